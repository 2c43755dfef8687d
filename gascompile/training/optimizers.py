"""What an optimizer keeps per parameter, and its hyperparameters as the update ops take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gascompile.errors import UnsupportedOpError
from gascompile.training import update_ops

_TILE_BYTES = 16 << 20
"""Of a moment: what the window that moments stream through is made of."""
TOTAL = "gradient"
"""Key of what gradients of several batches are added to."""
_SUPPORTED = "torch.optim.AdamW, torch.optim.Adam and torch.optim.SGD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Elements ``begin`` to ``end`` of a moment of a parameter."""

    parameter: str
    key: str
    """Name in torch's ``state``: ``exp_avg``."""
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name in plans."""
        return f"{self.parameter}:{self.key}[{self.begin}:{self.end}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One trainable parameter."""

    name: str
    index: int
    """Number in ``optimizer.state_dict()``."""
    group: int
    tiles: tuple[tuple[Tile, ...], ...]
    """Per range of the parameter, one tile of each moment."""
    ranges: tuple[tuple[int, int], ...]
    """First element and the one after the last, in the parameter's order of memory."""

    @property
    def totals(self) -> tuple[Tile, ...]:
        """Return what gradients of several batches are added to, a tile per range."""
        return tuple(
            Tile(parameter=self.name, key=TOTAL, begin=begin, end=end) for begin, end in self.ranges
        )


def require_rule(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what has no update rule; ``foreach``, ``fused`` and ``capturable`` only choose torch's kernels.

    Raises:
        UnsupportedOpError: names the optimizers and the options that have one.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise UnsupportedOpError(f"no update rule for {kind.__name__}; use one of {_SUPPORTED}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedOpError(
            f"the {kind.__name__} has step hooks, which a planned step does not call; remove them"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise UnsupportedOpError(
                    f"{option}=True has no update rule; make the {kind.__name__} without it"
                )


def structure(optimizer: torch.optim.Optimizer) -> list[list[object]]:
    """Return what plans are made for: per group its parameters and which moments they have."""
    return [
        [
            [id(parameter) for parameter in group["params"]],
            bool(group.get("momentum", True)),
            bool(group.get("decoupled_weight_decay", False)),
        ]
        for group in optimizer.param_groups
    ]


class Rules:
    """How one optimizer updates its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: Sequence[str]
    ) -> None:
        """Read the optimizer's groups.

        Args:
            optimizer: over the model's parameters.
            names: name of each parameter by its ``id``.
            trained: parameters that the loss gives a gradient.

        Raises:
            UnsupportedOpError: an optimizer or an option without a rule.
            ValueError: the optimizer holds parameters that are not the model's.
        """
        require_rule(optimizer)
        self.optimizer = optimizer
        self.is_adam = type(optimizer) is not torch.optim.SGD
        self.slots: dict[str, Slot] = {}
        index = 0
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"parameter {index} of the optimizer is none of the model's; make it over model.parameters()"
                    )
                name = names[id(parameter)]
                if name in trained:
                    self.slots[name] = self._slot(name, index, number, parameter)
                index += 1

    def _slot(self, name: str, index: int, group: int, parameter: torch.Tensor) -> Slot:
        if parameter.dtype != torch.float32:
            raise UnsupportedOpError(
                f"'{name}' is {parameter.dtype}; keep masters in float32 and compute under torch.autocast"
            )
        ranges = update_ops.tiles(parameter.numel(), _TILE_BYTES // parameter.element_size())
        keys = self.keys(self.optimizer.param_groups[group])
        return Slot(
            name=name,
            index=index,
            group=group,
            tiles=tuple(
                tuple(Tile(parameter=name, key=key, begin=begin, end=end) for key in keys)
                for begin, end in ranges
            ),
            ranges=tuple(ranges),
        )

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of a group's moments."""
        if self.is_adam:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if group["momentum"] else ()

    def hyper(self, group: int, step: int) -> torch.Tensor:
        """Return the hyperparameters of a group for the ``step``-th update, from one on."""
        values = self.optimizer.param_groups[group]
        if self.is_adam:
            beta1, beta2 = values["betas"]
            found = {**values, "beta1": beta1, "beta2": beta2, "step": step}
            names = update_ops.ADAM
        else:
            found, names = {**values, "step": step}, update_ops.SGD
        return torch.tensor([float(found[name]) for name in names], dtype=torch.float64)

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
                gradient, that of each range.
            tile_nodes: of moments, by name.
            scale: what gradients are multiplied by.
        """
        parameter, *gradients, hyper = nodes
        gradients *= len(slot.tiles) if len(gradients) == 1 else 1
        group = self.optimizer.param_groups[slot.group]
        found = []
        for tiles, (begin, end), gradient in zip(slot.tiles, slot.ranges, gradients, strict=True):
            moments = [tile_nodes[tile.name] for tile in tiles]
            if self.is_adam:
                decoupled = bool(group.get("decoupled_weight_decay", False))
                args = (parameter, gradient, *moments, hyper, scale, begin, decoupled)
                target = update_ops.adam
            else:
                momentum = moments[0] if moments else None
                args = (parameter, gradient, momentum, hyper, scale, begin, end)
                target = update_ops.sgd
            node = graph.call_function(target, args)
            node.meta["val"] = None
            found.append(node)
        return found
