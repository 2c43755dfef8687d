"""Running a captured program op by op with weights read in blocks: what measuring sensitivities walks along.

Values are kept by node. An op that changes an operand gets a copy, which takes the operand's place from there
on, so that runs of ops can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import Program, last_readers
from gascompile.core.sizes import format_size
from gascompile.core.sources import WeightSource
from gascompile.passes.graph.mutated_tensors import written_arguments
from gascompile.weights.rows import WeightRows

LINEAR = torch.ops.aten.linear.default
EMBEDDING = torch.ops.aten.embedding.default
_DETACH = torch.ops.aten.detach_.default
"""Called a change, and changes no value."""
Values = dict[fx.Node, Any]
_BLOCK_VALUES = 1 << 21
"""Of a matrix that are held at once: 8 MiB of float32."""
_SEED = 0  # any: equal models get equal forms


class UnmeasurableError(Exception):
    """The program or its inputs are not such that sensitivities can be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a program is run on."""

    program: Program
    """With weights as they are computed in."""
    sources: Mapping[str, WeightSource]
    held: Mapping[str, torch.Tensor]
    matrices: Collection[str]
    """Weights to measure, which linear layers and embeddings read."""
    forms: Collection[str]
    """Packed forms that are asked about."""
    limit_bytes: int
    """Most that values between ops may take."""


class SensitivityWalk:
    """The values of a program's ops on one set of inputs."""

    def __init__(self, setting: Setting, leaves: Sequence[Any], rows: WeightRows) -> None:
        self.setting = setting
        self._rows = rows
        program = setting.program
        self.nodes = program.op_nodes()
        self.weights: dict[fx.Node, str] = {}
        self.inputs: Values = {}
        left = list(leaves)
        for node in program.graph_module.graph.find_nodes(op="placeholder"):
            name = program.bindings.get(node.name)
            if name is None:
                value = _input_value(left.pop(0)) if left else None
                self.inputs[node] = self._told_apart(node, value)
            elif name in setting.held:
                self.inputs[node] = setting.held[name].cpu()
            else:
                self.weights[node] = name
        self._places = {node: place for place, node in enumerate(self.nodes)}
        self._last = self._last_uses()
        self._until = {
            used: self._places.get(node, len(self.nodes))
            for node, several in self._last.items()
            for used in several
        }
        self.before: dict[fx.Node, Values] = {}
        """What operands were before ops that change them, of the last run of ops that was kept."""

    def _told_apart(self, node: fx.Node, value: Any) -> Any:
        """Return an input; rows of a table in place of the same one over and over, as made-up inputs have them."""
        tables = [user.args[0] for user in node.users if user.target is EMBEDDING]
        program = self.setting.program
        names = [program.bindings.get(table.name) for table in tables if isinstance(table, fx.Node)]
        if not names or names[0] is None or value.numel() < 2 or len(value.unique()) > 1:
            return value
        generator = torch.Generator().manual_seed(_SEED)
        num_rows = program.bound[names[0]].shape[0]
        return torch.randint(0, num_rows, value.shape, generator=generator, dtype=value.dtype)

    def forward(
        self, run: Sequence[fx.Node], values: Values, beside: Sequence[Values], *, keep: bool
    ) -> None:
        """Run ops on ``values`` and add their results.

        Args:
            run: consecutive ops.
            values: what they need; results are added.
            beside: what else is kept meanwhile, which counts.
            keep: whether to keep what no later op needs.

        Raises:
            UnmeasurableError: all that is kept takes more than the limit.
            StorageError: a weight cannot be read.
        """
        held = _storages([values, *beside])
        limit_bytes = self.setting.limit_bytes
        self.before = {}
        for node in run:
            changed = {operand: values[operand] for operand in written(node)}
            for operand, value in changed.items():
                self._check_alone(node, operand, values)
                values[operand] = value.clone()
            if keep and changed:
                self.before[node] = changed
            values[node] = self.result(node, values)
            held |= _storages([{node: values[node]}])
            if sum(held.values()) > limit_bytes:
                raise UnmeasurableError(f"values take more than {format_size(limit_bytes)}")
            if not keep:
                for used in self._last.get(node, ()):
                    values.pop(used, None)

    def _check_alone(self, node: fx.Node, operand: fx.Node, values: Values) -> None:
        """Refuse to change a value that shares memory with others that are still needed."""
        others = {
            other: value
            for other, value in values.items()
            if other is not operand and self._until.get(other, -1) > self._places[node]
        }
        if values[operand].untyped_storage().data_ptr() in _storages([others]):
            raise UnmeasurableError(f"'{operand.name}' is changed, and others are views of it")

    def result(self, node: fx.Node, values: Values) -> Any:
        """Return what an op gives on ``values``."""
        if self.weight_of(node, LINEAR, 1) is not None:
            return self.product(node, values)
        if (name := self.weight_of(node, EMBEDDING, 0)) is not None:
            return self._gathered(name, values[as_node(node.args[1])])
        args, kwargs = self.arguments(node, values)
        return function(node)(*args, **kwargs)

    def arguments(self, node: fx.Node, values: Values) -> tuple[Any, Any]:
        """Return the arguments of an op with values in them, weights among them whole."""

        def value(argument: fx.Node) -> Any:
            if argument in self.weights:
                name = self.weights[argument]
                return self._computed(name, self._rows.whole(self.setting.sources[name]))
            return values[argument]

        return fx.node.map_arg((node.args, node.kwargs), value)

    def product(self, node: fx.Node, values: Values) -> torch.Tensor:
        """Return what a linear layer gives, its weight read block by block."""
        x, weight, bias = (*node.args, None)[:3]
        bias = node.kwargs.get("bias", bias)
        name = self.weights[as_node(weight)]
        operand = values[as_node(x)]
        parts = []
        for begin, end in self.blocks(name):
            block = self.block(name, begin, end)
            self.seen(name, block)
            parts.append(torch.nn.functional.linear(operand, block))
        result = torch.cat(parts, -1)
        if isinstance(bias, fx.Node):
            result += self.arguments(node, values)[0][2] if bias in self.weights else values[bias]
        return result

    def seen(self, name: str, block: torch.Tensor) -> None:
        """Take note of a block of a weight that a layer multiplies with."""

    def blocks(self, name: str) -> list[tuple[int, int]]:
        """Return ranges of rows that cover a matrix."""
        rows, columns = self.setting.program.bound[name].shape
        step = max(1, _BLOCK_VALUES // columns)
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def block(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return some rows of a matrix in the dtype that is computed in."""
        columns = self.setting.program.bound[name].shape[1]
        stored = self._rows.rows(self.setting.sources[name], begin, end, columns)
        return self._computed(name, stored)

    def _computed(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.setting.program.bound[name].dtype)
        return stored.to(dtype)

    def _gathered(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        unique, places = ids.unique(return_inverse=True)
        rows = [self.block(name, int(row), int(row) + 1) for row in unique]
        return torch.cat(rows or [self.block(name, 0, 1)])[places]

    def weight_of(self, node: fx.Node, target: object, place: int) -> str | None:
        """Return the weight that argument ``place`` of ``target`` is, if it is one and not the other operand."""
        if node.target is not target or len(node.args) <= place:
            return None
        argument = node.args[place]
        if not isinstance(argument, fx.Node) or node.args[1 - place] is argument:
            return None
        return self.weights.get(argument)

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Return by node the values that no later op needs."""
        (output,) = self.setting.program.graph_module.graph.find_nodes(op="output")
        frees = last_readers((*self.nodes, output))
        read = {value for values in frees.values() for value in values}
        for node in self.nodes:
            if node not in read:
                frees.setdefault(node, []).append(node)
        return frees


def written(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an op changes."""
    return [] if node.target is _DETACH else written_arguments(node)


def as_node(argument: object) -> fx.Node:
    """Return an argument that is a node."""
    assert isinstance(argument, fx.Node)
    return argument


def function(node: fx.Node) -> Callable[..., Any]:
    """Return what a node calls."""
    assert callable(node.target)
    return node.target


def _storages(kept: Sequence[Values]) -> dict[int, int]:
    """Return the bytes of all memory that values lie in, by address."""
    return {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in kept
        for value in pytree.tree_leaves(list(values.values()))
        if isinstance(value, torch.Tensor)
    }


def _input_value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta":
        raise UnmeasurableError("the inputs have no values")
    return value.detach().cpu()
