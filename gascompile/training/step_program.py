"""Step program: forward, backward and updates as one program, each gradient consumed as soon as it is whole.

A parameter is updated after the last op that reads it, so its gradient lives no longer than it must. Under
clipping by the global norm all gradients have to be there first, and the updates stand at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from gascompile.errors import CaptureError
from gascompile.program import BoundSpec, InputSpec, Program
from gascompile.training import update_ops
from gascompile.training.joint import Joint
from gascompile.training.optimizers import Rules, Slot, Tile

RANDOM = "random numbers"
"""What ops draw from and thereby change, so that none of them runs again with other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A program whose single output is the loss."""

    program: Program
    tiles: Mapping[str, Tile]
    """Moments by their name in the program."""
    num_groups: int
    """Hyperparameters come after the batch's leaves, a tensor per group."""


def step_program(
    joint: Joint, rules: Rules, *, name: str, max_grad_norm: float | None = None
) -> StepProgram:
    """Return the program of one step; ``joint`` is used up."""
    graph = joint.graph_module.graph
    builder = _Builder(joint, rules)
    builder.sum_parts()
    builder.copy_back()
    if max_grad_norm is None:
        for slot in rules.slots.values():
            builder.update(slot, after=builder.last_reader(slot.name), scale=None)
    else:
        scale = builder.clip(max_grad_norm)
        last = scale
        for slot in rules.slots.values():
            last = builder.update(slot, after=last, scale=scale)
    output = graph.output_node()
    output.args = ((joint.loss,),)
    output.meta.pop("desc", None)
    _remove_unused(graph)
    graph.lint()
    joint.graph_module.recompile()
    return builder.finish(name)


class _Builder:
    def __init__(self, joint: Joint, rules: Rules) -> None:
        self._joint, self._rules = joint, rules
        self._graph = joint.graph_module.graph
        nodes = {node.name: node for node in self._graph.nodes}
        self._parameter: dict[str, fx.Node] = {}
        for placeholder, name in joint.bound.items():
            self._parameter.setdefault(name, nodes[placeholder])
        self._gradient: dict[str, fx.Node] = {}
        first = next(iter(self._graph.nodes))
        self._tiles: dict[str, Tile] = {}
        self._tile_nodes: dict[str, fx.Node] = {}
        self._hyper: list[fx.Node] = []
        with self._graph.inserting_before(first):
            for slot in rules.slots.values():
                for tile in (tile for tiles in slot.tiles for tile in tiles):
                    node = self._graph.placeholder(f"moment_{len(self._tiles)}")
                    node.meta["val"] = (
                        self._parameter[slot.name].meta["val"].new_empty((tile.end - tile.begin,))
                    )
                    self._tiles[tile.name] = tile
                    self._tile_nodes[tile.name] = node
            for number in range(len(rules.optimizer.param_groups)):
                node = self._graph.placeholder(f"hyper_{number}")
                node.meta["val"] = joint.loss.meta["val"].new_empty(
                    (len(update_ops.ADAM if rules.is_adam else update_ops.SGD),),
                    dtype=torch.float64,
                )
                self._hyper.append(node)

    def sum_parts(self) -> None:
        """Add up the parts of the gradient of a parameter with several names."""
        for name, parts in self._joint.gradients.items():
            ordered = [node for node in self._graph.nodes if node in set(parts)]
            total = ordered[0]
            for part in ordered[1:]:
                with self._graph.inserting_after(part):
                    whole = self._graph.call_function(torch.ops.aten.add.Tensor, (total, part))
                whole.meta["val"] = part.meta["val"]
                total = whole
            if len(parts) != len(ordered):
                raise CaptureError(f"'{name}' gets the same gradient twice, which has no rule")
            self._gradient[name] = total

    def copy_back(self) -> None:
        """Let buffers have their new values in place, after all that reads the old ones."""
        for name, value in self._joint.mutations.items():
            buffer = self._parameter[name]
            after = self._later(self.last_reader(name), value)
            with self._graph.inserting_after(after):
                node = self._graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
            node.meta["val"] = buffer.meta["val"]

    def last_reader(self, name: str) -> fx.Node:
        """Return the last node that reads a tensor, directly or through views, or makes its gradient."""
        readers = {
            node
            for placeholder, bound in self._joint.bound.items()
            if bound == name
            for node in self._graph.nodes
            if node.name == placeholder
        }
        last = self._gradient.get(name, self._parameter[name])
        reached = set(readers)
        for node in self._graph.nodes:
            if reached & set(node.all_input_nodes):
                if _is_view(node):
                    reached.add(node)
                last = self._later(last, node)
        return last

    def _later(self, a: fx.Node, b: fx.Node) -> fx.Node:
        later: fx.Node = b if a < b else a
        return later

    def clip(self, limit: float) -> fx.Node:
        """Add the norm of all gradients at the end; return what they are multiplied by."""
        gradients = [self._gradient[name] for name in self._rules.slots]
        val = self._joint.loss.meta["val"]
        with self._graph.inserting_before(self._graph.output_node()):
            norms = []
            for gradient in gradients:
                norm = self._graph.call_function(
                    torch.ops.aten.linalg_vector_norm.default, (gradient,)
                )
                norm.meta["val"] = val.new_empty(())
                norms.append(norm)
            scale = self._graph.call_function(update_ops.clip_scale, (norms, limit))
        scale.meta["val"] = val.new_empty(())
        return scale

    def update(self, slot: Slot, *, after: fx.Node, scale: fx.Node | None) -> fx.Node:
        """Add the updates of a parameter after a node; return the last of them."""
        nodes = (self._parameter[slot.name], self._gradient[slot.name], self._hyper[slot.group])
        with self._graph.inserting_after(after):
            anchor = self._graph.call_function(torch.ops.aten.detach.default, (nodes[1],))
        with self._graph.inserting_before(anchor):
            found = self._rules.insert(self._graph, slot, nodes, self._tile_nodes, scale)
        self._graph.erase_node(anchor)
        return found[-1]

    def finish(self, name: str) -> StepProgram:
        joint, graph = self._joint, self._graph
        bindings = {**joint.bound, **{node.name: tile for tile, node in self._tile_nodes.items()}}
        nodes = {node.name: node for node in graph.nodes}
        bound = {bindings[p]: _bound(nodes[p]) for p in bindings}
        states = {*self._tiles, *self._rules.slots, *joint.mutations}
        inputs = (*joint.inputs, *(node.name for node in self._hyper))
        program = Program(
            name=name,
            graph_module=joint.graph_module,
            inputs=tuple(_input(nodes[node], i) for i, node in enumerate(inputs)),
            bindings=bindings,
            bound=bound,
            states=frozenset(states),
            in_spec="",
            out_spec="",
        )
        return StepProgram(program=program, tiles=self._tiles, num_groups=len(self._hyper))


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(value.alias_info is not None for value in node.target._schema.returns)


def _bound(node: fx.Node) -> BoundSpec:
    value = node.meta["val"]
    return BoundSpec(dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))


def _input(node: fx.Node, number: int) -> InputSpec:
    value = node.meta.get("val")
    path = f"inputs[{number}]"
    if not isinstance(value, torch.Tensor):
        return InputSpec(name=node.name, path=path, constant=repr(value))
    dtype = str(value.dtype).removeprefix("torch.")
    return InputSpec(name=node.name, path=path, dtype=dtype, shape=tuple(value.shape))


def _remove_unused(graph: fx.Graph) -> None:
    """Erase ops whose results nobody reads and that change nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        target = node.target
        mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        if not mutable and not is_random(node):
            graph.erase_node(node)


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )
