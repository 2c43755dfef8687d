"""Step program: forward, backward and updates as one program, each gradient consumed as soon as it is whole.

A parameter is updated after the last op that reads it, so its gradient lives no longer than it must. Under
clipping by the global norm all gradients have to be there first, and the updates stand at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.core.program import Program
from gascompile.core.ranks import RankLayout
from gascompile.passes.graph.bound_aliases import bound_aliases
from gascompile.training.optimizers import update_ops
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.optimizers.slots import Slot, StateTile
from gascompile.training.planning import rank_nodes
from gascompile.training.planning.program_specs import bound_spec, input_spec, remove_unused

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

RANDOM = "random numbers"
"""What ops draw from and thereby change, so that none of them runs again with other numbers."""
EXCHANGE = "exchanges between ranks"
"""What ops of several ranks change, so that every rank runs each of them once, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What a step does beside its updates."""

    trains: bool = True
    """False for the loss alone."""
    max_grad_norm: float | None = None
    grad_norm: bool = False
    """The norm of all gradients is a result even where nothing is clipped."""
    accumulates: bool = False
    """Gradients are added to totals that persist, and updates take the totals."""
    updates: bool = True
    """False for a step that only adds to the totals."""
    pending: frozenset[str] = frozenset()
    """Parameters whose totals hold gradients of batches before, whether this one adds to them or not."""
    calls: bool = False
    """The model is called as it is, and all that it returns is wanted."""
    refuses_nan: bool = False
    """A loss that is NaN ends the step before anything that persists has changed."""
    layout: RankLayout | None = None
    """Of several ranks: the loss and gradients are summed over all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A program whose outputs are the loss and, where computed, the norm of all gradients; of a call all it returns."""

    program: Program
    tiles: Mapping[str, StateTile]
    """Moments and totals by their name in the program."""
    outside: tuple[torch.Tensor, ...]
    """Inputs after the batch's leaves."""
    num_constants: int
    """How many of those, the last, are the trace's own and never change."""
    num_groups: int
    """Hyperparameters come after those, a tensor per group."""
    gradients: frozenset[str]
    """Parameters of the optimizer that the batch gives a gradient; others are left as they are."""

    def require_outside(self) -> None:
        """Refuse tensors from outside the model that are not what they were when the step was planned.

        Raises:
            PlanMismatchError: names the shapes.
        """
        last = len(self.program.inputs) - self.num_groups
        specs = self.program.inputs[last - len(self.outside) : last]
        for spec, tensor in zip(specs, self.outside, strict=True):
            if tuple(tensor.shape) != spec.shape:
                raise PlanMismatchError(
                    f"a tensor from outside the model that loss_fn uses was {list(spec.shape or ())} and is "
                    f"{list(tensor.shape)} now; change only its values, or pass it in the batch"
                )


def step_program(joint: Joint, rules: Rules, *, name: str, options: StepOptions) -> StepProgram:
    """Return the program of one step; ``joint`` is used up."""
    graph = joint.graph_module.graph
    builder = _Builder(joint, rules, options)
    builder.copy_what_is_bound()
    builder.find_ends()
    builder.copy_back()
    if options.trains:
        builder.take_gradients()
    output = graph.output_node()
    output.args = ((*builder.outputs, *builder.norm),)
    output.meta.pop("desc", None)
    builder.gather_divided()
    remove_unused(graph)
    graph.lint()
    joint.graph_module.recompile()
    return builder.finish(name)


class _Builder:
    def __init__(self, joint: Joint, rules: Rules, options: StepOptions) -> None:
        self._joint, self._rules, self._options = joint, rules, options
        self._graph = joint.graph_module.graph
        self._nodes = {node.name: node for node in self._graph.nodes}
        self._parameter: dict[str, fx.Node] = {}
        self._bound = dict(joint.bound)
        for placeholder, name in joint.bound.items():
            self._parameter.setdefault(name, self._nodes[placeholder])
        self._parameter.update(joint.views)
        self._gradient = dict(joint.gradients)
        self._mutations = dict(joint.mutations)
        self._ends: dict[str, fx.Node] = {}
        self._check: fx.Node | None = None
        self._tiles: dict[str, StateTile] = {}
        self._tile_nodes: dict[str, fx.Node] = {}
        self._parts: dict[str, list[fx.Node]] = {}  # of gradients, what this rank updates
        self._hyper: list[fx.Node] = []
        self._norms: list[fx.Node] = []
        self._copied: set[str] = set()
        self._part_norms: list[fx.Node] = []  # of what other ranks have other parts of
        self.norm: tuple[fx.Node, ...] = ()
        """That of all gradients, of a step that computes it."""
        self._layout = options.layout if not options.calls else None
        self._loss = joint.loss
        self.outputs = joint.outputs
        """What comes out beside it; of several ranks the loss over all rows."""
        if self._layout is not None:
            with self._graph.inserting_before(joint.loss.next):
                (self._loss,) = rank_nodes.added(self._graph, [joint.loss])
            self.outputs = (self._loss,)
            rank_nodes.require_synchronised(self._graph)
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            self._add_placeholders()

    def _add_placeholders(self) -> None:
        """Add all that persists, whether this step touches it or not: memory is planned for all of it.

        What is kept of frozen parameters is out of memory.
        """
        touched = self._gradient.keys() | self._options.pending
        for slot in self._rules.slots.values():
            wanted = list(slot.parts)
            if not slot.is_frozen or slot.name in touched:
                wanted += [tile for tiles in slot.tiles for tile in tiles]
                wanted += slot.totals if self._options.accumulates else ()
            for tile in wanted:
                node = self._graph.placeholder(f"moment_{len(self._tiles)}")
                node.meta["val"] = (
                    self._parameter[slot.name]
                    .meta["val"]
                    .new_empty((tile.length,), dtype=tile.dtype)
                )
                self._tiles[tile.name] = tile
                self._tile_nodes[tile.name] = node
        for number in range(len(self._rules.optimizer.param_groups)):
            node = self._graph.placeholder(f"hyper_{number}")
            node.meta["val"] = self._joint.loss.meta["val"].new_empty(
                (self._rules.hyper_length(number),), dtype=torch.float64
            )
            self._hyper.append(node)

    def copy_what_is_bound(self) -> None:
        """Copy gradients and new values that are parameters or buffers, or views of some, before these change."""
        owners = bound_aliases(self._graph, self._joint.bound)
        *_, last = (node for node in self._graph.nodes if node.op == "placeholder")
        for values in (self._gradient, self._mutations):
            for name, value in values.items():
                if owners.get(value):
                    with self._graph.inserting_after(last if value.op == "placeholder" else value):
                        copy = self._graph.call_function(torch.ops.aten.clone.default, (value,))
                    copy.meta["val"] = value.meta["val"]
                    values[name] = copy

    def _owner(self, name: str) -> str:
        """Return the bound tensor that has a parameter's memory."""
        view = self._joint.views.get(name)
        if view is None:
            return name
        (whole,) = view.all_input_nodes
        return self._joint.bound[whole.name]

    def find_ends(self) -> None:
        """Find the last node that reads each bound tensor, directly or through views, or makes its gradient."""
        owners = bound_aliases(self._graph, self._joint.bound)
        for node in self._graph.nodes:
            if node.op == "call_function":
                for read in node.all_input_nodes:
                    self._ends.update(dict.fromkeys(owners[read], node))
        for name, gradient in self._gradient.items():
            owner = self._owner(name)
            self._ends[owner] = self._later(self._ends.get(owner, gradient), gradient)
        if self._options.refuses_nan:
            loss = self._loss
            with self._graph.inserting_after(loss):
                self._check = self._graph.call_function(
                    update_ops.refuse_nan, (loss, self._hyper[0])
                )
            self._check.meta["val"] = None

    def _later(self, *nodes: fx.Node | None) -> fx.Node:
        return max(node for node in nodes if node is not None)

    def copy_back(self) -> None:
        """Let buffers have their new values in place, after all that reads the old ones."""
        for name, value in self._mutations.items():
            if self._options.layout is not None:
                rank_nodes.require_same_on_all(name, value, self._joint)
            buffer = self._parameter[name]
            after = self._later(value, self._ends.get(name), self._check)
            if after.op == "placeholder":
                *_, after = (node for node in self._graph.nodes if node.op == "placeholder")
            with self._graph.inserting_after(after):
                node = self._graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
            node.meta["val"] = buffer.meta["val"]

    def take_gradients(self) -> None:
        """Add what becomes of gradients: sums, their norm, updates."""
        options, slots = self._options, self._updated()
        wants = options.updates and (options.grad_norm or options.max_grad_norm is not None)
        clips = wants and options.max_grad_norm is not None and bool(slots)
        # Small gradients of several ranks are summed at once, in the end.
        late = [slot for slot in slots if self._is_late(slot)]
        sharing: dict[str, list[Slot]] = {}
        for slot in slots:
            if slot not in late:
                sharing.setdefault(self._owner(slot.name), []).append(slot)
        for owner, members in sharing.items():
            end = self._ends.get(owner, self._joint.loss)
            anchor = self._anchor(self._later(end, self._check))
            with self._graph.inserting_before(anchor):
                for slot in members:
                    self._take(slot, clips=clips)
            self._graph.erase_node(anchor)
        with self._graph.inserting_before(self._graph.output_node()):
            if late:
                nodes = rank_nodes.added(self._graph, [self._gradient[s.name] for s in late])
                self._gradient.update(zip((slot.name for slot in late), nodes, strict=True))
            for slot in late:
                self._take(slot, clips=clips, is_whole=True)
            if clips and options.max_grad_norm is not None:
                for slot in slots:
                    self._measure(slot)
                norms = self._all_norms()
                scale = self._of_norms(update_ops.clip_scale, norms, options.max_grad_norm)
                self.norm = (self._of_norms(update_ops.total_norm, norms),)
                for slot in slots:
                    self._update(slot, self._taken(slot), scale)
            elif wants and (norms := self._all_norms()):
                self.norm = (self._of_norms(update_ops.total_norm, norms),)
            if options.updates:
                self._copied = rank_nodes.copied(self._graph, self._joint, self._parameter)

    def _is_late(self, slot: Slot) -> bool:
        """Return whether a gradient is so small that it waits for others to be summed over the ranks with."""
        parameter = self._parameter[slot.name]
        return slot.name in self._gradient and rank_nodes.is_small(parameter, self._layout)

    def _take(self, slot: Slot, *, clips: bool, is_whole: bool = False) -> None:
        """Add what becomes of a parameter's gradient as soon as it is there.

        Args:
            clips: the update follows when all gradients are there.
            is_whole: the gradient is that of all ranks.
        """
        options = self._options
        if self._layout is not None and not is_whole and slot.name in self._gradient:
            gradient, like = self._gradient[slot.name], self._parameter[slot.name]
            if slot.bounds:
                nodes = rank_nodes.own_parts(self._graph, slot, gradient, like, self._layout.rank)
                self._parts[slot.name] = nodes
            else:
                (self._gradient[slot.name],) = rank_nodes.added(self._graph, [gradient])
        if options.accumulates and slot.name in self._gradient:
            self._accumulate(slot)
        if options.updates and not clips:
            if options.grad_norm:
                self._measure(slot)
            self._update(slot, self._taken(slot), None)

    def _updated(self) -> list[Slot]:
        """Return the parameters that have a gradient; as in eager, others do not even decay."""
        touched = self._gradient.keys() | self._options.pending
        return [s for s in self._rules.slots.values() if s.name in touched and s.ranges]

    def _anchor(self, after: fx.Node) -> fx.Node:
        with self._graph.inserting_after(after):
            return self._graph.call_function(torch.ops.aten.detach.default, (after,))

    def _taken(self, slot: Slot) -> list[fx.Node]:
        """Return what is updated with: the gradient, or the totals of its ranges."""
        if self._options.accumulates:
            return [self._tile_nodes[tile.name] for tile in slot.totals]
        return self._parts.get(slot.name) or [self._gradient[slot.name]]

    def _accumulate(self, slot: Slot) -> None:
        own = self._parts.get(slot.name) or [self._gradient[slot.name]] * len(slot.ranges)
        layout = self._parameter[slot.name].meta["val"]
        for total, gradient, (begin, _) in zip(self._taken(slot), own, slot.ranges, strict=True):
            args = (total, gradient, list(layout.shape), list(layout.stride()), begin)
            node = self._graph.call_function(update_ops.accumulate, args)
            node.meta["val"] = None

    def _measure(self, slot: Slot) -> None:
        """Add the norm of a gradient."""
        for gradient in self._taken(slot):
            norm = self._graph.call_function(torch.ops.aten.linalg_vector_norm.default, (gradient,))
            norm.meta["val"] = gradient.meta["val"].new_empty(())
            (self._part_norms if slot.is_spread else self._norms).append(norm)

    def _all_norms(self) -> list[fx.Node]:
        """Return the norms that make that of all gradients, on all ranks."""
        slots, own = self._rules.slots.values(), (self._norms, self._part_norms)
        return rank_nodes.all_norms(self._graph, slots, *own, self._loss)

    def _of_norms(self, op: torch._ops.OpOverload, norms: list[fx.Node], *args: float) -> fx.Node:
        """Add an op of the norms of all gradients, whose result is one number."""
        node = self._graph.call_function(op, (norms, *args))
        node.meta["val"] = norms[0].meta["val"].new_empty(())
        return node

    def _update(self, slot: Slot, gradients: list[fx.Node], scale: fx.Node | None) -> None:
        nodes = (self._parameter[slot.name], *gradients, self._hyper[slot.group])
        self._rules.insert(self._graph, slot, nodes, self._tile_nodes, scale)
        if slot.stage is None and self._layout is not None:
            rank_nodes.gathered(self._graph, slot, self._parameter[slot.name])
        for total in gradients if self._options.accumulates else ():
            zero = self._graph.call_function(torch.ops.aten.zero_.default, (total,))
            zero.meta["val"] = total.meta["val"]

    def gather_divided(self) -> None:
        """Let what reads a divided parameter read it gathered.

        Raises:
            UnsupportedOpError: the forward pass changes one.
        """
        for slot in self._rules.slots.values():
            if not slot.parts:
                continue
            if slot.name in self._mutations:
                raise UnsupportedOpError(
                    f"the model changes '{slot.name}' in its forward pass, of which each rank keeps a part alone; "
                    "change it between steps by load_state_dict() of the step, or train in one process"
                )
            parameter = self._parameter[slot.name]
            for placeholder in [p for p, name in self._bound.items() if name == slot.name]:
                del self._bound[placeholder]
                if self._nodes[placeholder] is not parameter:
                    self._nodes[placeholder].replace_all_uses_with(parameter)
                    self._graph.erase_node(self._nodes[placeholder])
            parts = [self._tile_nodes[tile.name] for tile in slot.parts]
            rank_nodes.divide(self._graph, slot, parameter, parts, self._joint.loss)
            self._graph.erase_node(parameter)

    def finish(self, name: str) -> StepProgram:
        joint, graph = self._joint, self._graph
        out_spec = joint.out_spec
        if self.norm:
            out_spec = pytree.tree_structure((0, 0))
        bindings = {**self._bound, **{node.name: tile for tile, node in self._tile_nodes.items()}}
        nodes = {node.name: node for node in graph.nodes}
        bound = {bindings[p]: bound_spec(nodes[p]) for p in bindings}
        options = self._options
        updated = self._updated() if options.trains and options.updates else ()
        changed = {self._owner(slot.name) for slot in updated if slot.stage is None}
        changed.update(tile.name for slot in updated for tile in slot.parts)
        moments = (name for name, tile in self._tiles.items() if not tile.is_part)
        states = {*moments, *changed, *joint.mutations, *self._copied}
        inputs = (*joint.inputs, *joint.outside, *(node.name for node in self._hyper))
        # As in every program: what is bound, then inputs in their order.
        first = next(node for node in nodes.values() if node.op != "placeholder")
        for placeholder in (*bindings, *inputs):
            first.prepend(nodes[placeholder])
        program = Program(
            name=name,
            graph_module=joint.graph_module,
            inputs=tuple(input_spec(nodes[node], i) for i, node in enumerate(inputs)),
            bindings=bindings,
            bound=bound,
            states=frozenset(states),
            in_spec=pytree.treespec_dumps(pytree.tree_structure((inputs, {}))),
            out_spec=pytree.treespec_dumps(out_spec),
        )
        return StepProgram(
            program=program,
            tiles=self._tiles,
            outside=tuple(joint.outside.values()),
            num_constants=joint.num_constants,
            num_groups=len(self._hyper),
            gradients=(joint.trained or frozenset(self._gradient)) & self._rules.slots.keys(),
        )
