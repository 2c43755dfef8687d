"""What an optimizer keeps per parameter, and its hyperparameters as the update ops take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import Argument

from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.core.ranks import RankLayout, StageLayout
from gascompile.runtime.kernels.state_codes import SIGNED, UNSIGNED
from gascompile.training.optimizers import class_updates, coded_updates, update_ops
from gascompile.training.optimizers.known_classes import RULES, rule_of
from gascompile.training.optimizers.own_step import require_own_step
from gascompile.training.optimizers.rule_trials import require_followed
from gascompile.training.optimizers.slots import PART, TOTAL, Slot, Stage, StateTile
from gascompile.training.state.open_optimizer import listed

StateForm = Literal["fp32", "8bit"]
STATE_FORMS: tuple[StateForm, ...] = ("fp32", "8bit")

_TILE_BYTES = 16 << 20
"""Of a moment: what the window that moments stream through is made of."""
_FEWEST_CODED = 4096
"""Elements of a parameter: the states of smaller ones stay in float32, as they take little and matter much."""
FEWEST_SHARED = 1 << 14
"""Elements per rank of a parameter: what is smaller each rank updates as a whole, and its gradient goes with others in
one exchange. [Empirical] An exchange takes a millisecond beside its bytes, in which Gloo moves 64 Ki elements."""
SUPPORTED = "AdamW, Adam, SGD, " + ", ".join(
    dict.fromkeys(rule.kind for rule in RULES if rule.kind not in ("Adam", "AdamW"))
)
"""Names of the classes whose updates are planned."""


def require_rule(optimizer: torch.optim.Optimizer, states: StateForm = "fp32") -> None:
    """Refuse what has no update rule; ``foreach``, ``fused`` and ``capturable`` only choose torch's kernels.

    Raises:
        UnsupportedOpError: names the optimizers and the options that have one.
    """
    kind, rule = type(optimizer), rule_of(optimizer)
    if rule is None and kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise UnsupportedOpError(
            f"no update rule for {kind.__name__}; use one of {SUPPORTED}, or pass unplanned_optimizer=True: torch "
            "then updates all parameters at once, which have to fit memory for that time"
        )
    require_own_step(optimizer)
    if rule is not None:
        require_followed(rule, optimizer)
        if states != "fp32":
            option = " with amsgrad=True" if rule.fused else ""
            raise UnsupportedOpError(
                f"states={states!r} is of AdamW, Adam and SGD; leave it out for {kind.__name__}{option}"
            )
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOpError(
            f"differentiable=True has no update rule; make the {kind.__name__} without it, or pass "
            "unplanned_optimizer=True"
        )


def fixed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[object]:
    """Return what a program has in it of the options of a group; all others are inputs of its updates."""
    rule = rule_of(optimizer)
    if rule is not None:
        return rule.fixed(group)
    return [bool(group.get("momentum", True)), bool(group.get("decoupled_weight_decay", False))]


def structure(optimizer: torch.optim.Optimizer, *, moments: bool = True) -> list[list[object]]:
    """Return what plans are made for: per group its parameters and, if wanted, which moments they have."""
    return [
        [
            [id(parameter) for parameter in group["params"]],
            fixed(optimizer, group) if moments else [],
        ]
        for group in optimizer.param_groups
    ]


class Rules:
    """How one optimizer updates its parameters."""

    plans_updates = True
    """False where torch's own optimizer updates."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        trained: Sequence[str],
        states: StateForm = "fp32",
        layout: RankLayout | None = None,
        stages: Mapping[str, Stage] = MappingProxyType({}),
        placed: StageLayout | None = None,
    ) -> None:
        """Read the optimizer's groups.

        Args:
            optimizer: over the model's parameters.
            names: name of each parameter by its ``id``.
            trained: parameters that the loss gives a gradient. Those that it gives none today have room, too.
            states: how moments are kept.
            layout: of several ranks, each of which updates a part of large parameters and keeps its moments.
            stages: of the parameters of which each rank keeps a part alone.
            placed: of a pipeline, which rank has which parameters.

        Raises:
            UnsupportedOpError: an optimizer or an option without a rule, or a parameter twice.
            ValueError: the optimizer holds parameters that are not the model's.
        """
        self.optimizer, self.states, self.layout = optimizer, states, layout
        self._stages, self.placed = stages, placed
        self.require(optimizer)
        self.by_class = rule_of(optimizer) if self.plans_updates else None
        """Rule of an optimizer that updates by its own class."""
        is_plain = self.plans_updates and self.by_class is None
        self.is_adam = is_plain and type(optimizer) is not torch.optim.SGD
        self.slots: dict[str, Slot] = {}
        index, seen = 0, set[str]()
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"parameter {index} of the optimizer is none of the model's; make it over model.parameters()"
                    )
                name = names[id(parameter)]
                if name in seen:
                    raise UnsupportedOpError(
                        f"the optimizer has '{name}' twice, and torch would update it twice; leave one out"
                    )
                seen.add(name)
                if name in trained or parameter.dtype == torch.float32:
                    self.slots[name] = self._slot(name, index, number, parameter)
                index += 1
        self.rows: list[list[str]] = [[] for _ in optimizer.param_groups]
        """Names of each group's slots, in the order of their rows."""
        for slot in self.slots.values():
            self.rows[slot.group].append(slot.name)

    @property
    def trained(self) -> frozenset[str]:
        """Return the parameters that updates may change, as long as none is unfrozen."""
        return frozenset(slot.name for slot in self.slots.values() if not slot.is_frozen)

    def require(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what has no rule; see ``require_rule``."""
        require_rule(optimizer, self.states)

    @property
    def counts_steps(self) -> bool:
        """Return whether the optimizer keeps the number of a parameter's update as ``step``."""
        return self.by_class.counts if self.by_class is not None else self.is_adam

    def ranges(self, parameter: torch.Tensor) -> list[tuple[int, int]]:
        """Return the ranges of a parameter that are updated one by one."""
        if self.by_class is not None and self.by_class.whole:
            return [(0, parameter.numel())]
        return update_ops.tiles(parameter.numel(), _TILE_BYTES // parameter.element_size())

    def _slot(self, name: str, index: int, group: int, parameter: torch.Tensor) -> Slot:
        if parameter.dtype != torch.float32:
            raise UnsupportedOpError(
                f"'{name}' is {parameter.dtype}; keep masters in float32 and compute under torch.autocast"
            )
        ranges = self.ranges(parameter)
        bounds = self._bounds(parameter, ranges)
        if self.layout is not None and bounds:
            own = self.layout.rank
            ranges = [(parts[own], parts[own + 1]) for parts in bounds]
        placed = self.placed
        owner = placed.owners.get(name, 0) if placed is not None else None
        if placed is not None and owner != placed.rank:
            ranges = []
        keys = self.keys(self.optimizer.param_groups[group], parameter.dim())
        is_coded = self.states == "8bit" and parameter.numel() >= _FEWEST_CODED
        codes = {key: UNSIGNED if key == "exp_avg_sq" else SIGNED for key in keys if is_coded}
        return Slot(
            name=name,
            index=index,
            group=group,
            row=sum(slot.group == group for slot in self.slots.values()),
            is_frozen=not parameter.requires_grad,
            tiles=tuple(
                tuple(
                    StateTile(
                        parameter=name,
                        key=key,
                        begin=begin if lies is None else lies[0],
                        end=end if lies is None else lies[1],
                        code=codes.get(key),
                    )
                    for key in keys
                    for lies in (self._own_place(key, parameter, number),)
                )
                for number, (begin, end) in enumerate(ranges)
            ),
            ranges=tuple(ranges),
            bounds=bounds,
            stage=self._stage(name) if bounds or placed is not None else None,
            owner=owner,
            keys=keys,
        )

    def _stage(self, name: str) -> Stage | None:
        if self.placed is None:
            return self._stages.get(name)
        return None if name in self.placed.held else "elsewhere"

    def _bounds(
        self, parameter: torch.Tensor, ranges: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, ...], ...]:
        """Return which rank updates what of each range; nothing where each updates all."""
        layout, by_class = self.layout, self.by_class
        if layout is None or parameter.numel() < layout.size * FEWEST_SHARED:
            return ()
        # Codes are of tiles of a length, and some classes have states that are not those of elements.
        if self.states != "fp32" or (by_class is not None and (by_class.whole or by_class.lies)):
            return ()
        return tuple(layout.bounds(begin, end) for begin, end in ranges)

    def _own_place(self, key: str, parameter: torch.Tensor, number: int) -> tuple[int, int] | None:
        """Return the elements of a state in a range, where they are not those of the parameter."""
        rule = self.by_class
        if rule is None or key not in rule.lies:
            return None
        # Of one number each range has a copy.
        scalar = (number, number + 1)
        return scalar if rule.is_scalar(key) else (0, rule.like(key, parameter).numel())

    def like(self, key: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that lies as a moment of ``parameter`` does."""
        is_own = key in (TOTAL, PART)
        return parameter if is_own or self.by_class is None else self.by_class.like(key, parameter)

    def is_scalar(self, key: str) -> bool:
        """Return whether a moment is one number."""
        return self.by_class is not None and self.by_class.is_scalar(key)

    def first(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Return what moments have before the first update, where the optimizer has them from its start."""
        return {} if self.by_class is None else self.by_class.first(group)

    def keys(self, group: Mapping[str, Any], num_dimensions: int) -> tuple[str, ...]:
        """Return the names of the moments that a parameter of a group has."""
        if self.by_class is not None:
            return self.by_class.states(group, num_dimensions)
        if self.is_adam:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if group["momentum"] else ()

    def hyper_length(self, group: int) -> int:
        """Return the number of elements of ``hyper``."""
        if self.by_class is not None:
            num_options = self.by_class.length
        else:
            num_options = len(update_ops.ADAM if self.is_adam else update_ops.SGD)
        return num_options + len(self.rows[group]) + 1

    def hyper(self, group: int, counts: Mapping[str, int], number: int) -> torch.Tensor:
        """Return the hyperparameters of a group: its options, the number of each slot's update, and of the step.

        Args:
            group: number of the group.
            counts: updates of each slot so far.
            number: of the step, from one on.
        """
        values = dict(self.optimizer.param_groups[group])
        if self.by_class is not None:
            options = self.by_class.numbers(values)
        else:
            if self.is_adam:
                values["beta1"], values["beta2"] = values["betas"]
            names = update_ops.ADAM if self.is_adam else update_ops.SGD
            options = [float(values[name]) for name in names]
        steps = [counts[name] + 1 for name in self.rows[group]]
        return torch.tensor([*options, *steps, number], dtype=torch.float64)

    def tiles(self, *, accumulates: bool) -> list[StateTile]:
        """Return all that is kept of all parameters."""
        every = []
        for slot in self.slots.values():
            every += [tile for tiles in slot.tiles for tile in tiles]
            every += slot.totals if accumulates else ()
            every += slot.parts
        return every

    def counts(self, entries: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, int], int]:
        """Return how often each parameter was updated, as far as its rule counts, and how often any was.

        Args:
            entries: of the optimizer's state, by number of the parameter.
        """
        steps = [int(entry["step"]) for entry in entries.values() if "step" in entry]
        counts = {}
        for slot in self.slots.values():
            entry = entries[slot.index]
            if self.counts_steps:
                counts[slot.name] = int(entry["step"]) if entry else 0
            else:
                counts[slot.name] = int(any(entry.get(key) is not None for key in slot.keys))
        return counts, max(steps, default=0)

    def check_groups(self, groups: list[dict[str, Any]]) -> None:
        """Refuse ``param_groups`` of another optimizer.

        Raises:
            CheckpointError: names what is different.
        """
        own_groups = listed(self.optimizer)["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in own_groups]
        if sizes != own:
            raise CheckpointError(
                f"the optimizer's state has {sizes} parameters per group, this optimizer {own}; "
                "make it over the same parameters in the same groups"
            )
        for number, (group, mine) in enumerate(zip(groups, own_groups, strict=True)):
            lacking = sorted(set(mine) - set(group) - {"param_names", "initial_lr"})
            if lacking or self._kind_of(group) != self._kind_of(mine):
                raise CheckpointError(
                    f"group {number} of the optimizer's state is of another kind of optimizer than "
                    f"{type(self.optimizer).__name__}: {lacking or 'other moments'}"
                )

    def _kind_of(self, group: Mapping[str, Any]) -> object:
        return self.by_class.fixed(group) if self.by_class is not None else self.keys(group, 2)

    def insert(
        self,
        graph: fx.Graph,
        slot: Slot,
        nodes: Sequence[fx.Node],
        tile_nodes: Mapping[str, fx.Node],
        scale: fx.Node | None,
    ) -> list[fx.Node]:
        """Add the updates of a parameter at the graph's place of insertion.

        Args:
            graph: of the step.
            slot: of the parameter.
            nodes: the parameter, its gradient, and the hyperparameters of its group; or, in place of the
                gradient, that of each range. A divided parameter is the parts that ``tile_nodes`` has.
            tile_nodes: of moments, by name.
            scale: what gradients are multiplied by.
        """
        parameter, *gradients, hyper = nodes
        gradients *= len(slot.tiles) if len(gradients) == 1 else 1
        group = self.optimizer.param_groups[slot.group]
        updates = []
        parts = [(tile_nodes[tile.name], 0, tile.num_elements) for tile in slot.parts]
        places = parts or [(parameter, *ends) for ends in slot.ranges]
        for tiles, (value, begin, end), gradient in zip(slot.tiles, places, gradients, strict=True):
            moments = [tile_nodes[tile.name] for tile in tiles]
            is_coded = any(tile.code is not None for tile in tiles)
            args: tuple[Argument, ...]
            if self.by_class is not None:
                padded = [*moments, *[None] * (class_updates.MOST_STATES - len(moments))]
                args = (value, gradient, *padded, hyper, scale, begin, end, slot.row)
                target = class_updates.OPS[self.by_class.name]
            elif self.is_adam:
                decoupled = bool(group.get("decoupled_weight_decay", False))
                place = (begin, end, decoupled) if is_coded else (begin, decoupled)
                args = (value, gradient, *moments, hyper, scale, *place, slot.row)
                target = coded_updates.adam_coded if is_coded else update_ops.adam
            else:
                momentum = moments[0] if moments else None
                args = (value, gradient, momentum, hyper, scale, begin, end, slot.row)
                target = coded_updates.sgd_coded if is_coded else update_ops.sgd
            node = graph.call_function(target, args)
            node.meta["val"] = None
            updates.append(node)
        return updates
