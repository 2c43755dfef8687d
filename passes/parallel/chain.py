"""Chain: a workload as blocks that follow each other, the layers of which are alike.

A block is what the names of weights say: all ops from the first that reads ``model.layers.3.*`` to the first that reads
the next number. What comes before the first such op and from the first op with weights after the last is the head's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.workload import PERSISTENT, OpSpec, TensorKind, TensorSpec, Workload

_NUMBERED = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")
_ALIKE = 0.02
"""Layers whose bytes or FLOPs differ by more are not alike: a captured model's first layer has an op or two more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Ops that stay together, and what they need."""

    name: str
    weight_bytes: int = 0
    table_bytes: int = 0
    """Of weights of which only some rows are read: they are not part of ``weight_bytes``."""
    state_bytes: int = 0
    """What outlives an iteration beside weights: a cache."""
    flops: int = 0
    moved_bytes: int = 0
    """Read and written by its ops."""
    num_ops: int = 0
    out_bytes: int = 0
    """What later blocks read of what it and earlier ones wrote."""
    saved_bytes: int = 0
    """Everything that its ops write: what a backward pass may need."""
    workspace_bytes: int = 0
    time_s: float | None = None
    """Of an annotated workload whose ops say neither FLOPs nor bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What comes before, ``num_layers`` times the same, and what comes after."""

    name: str
    first: Block
    layer: Block
    """The largest of each number over all layers."""
    num_layers: int
    last: Block

    @property
    def ends(self) -> Block:
        """What comes before and after the layers, as one block; tables are read whole where they are trained."""
        block = _sum("ends", (self.first, self.last))
        return replace(block, weight_bytes=block.weight_bytes + block.table_bytes, table_bytes=0)

    @property
    def table_bytes(self) -> int:
        """Weights of the head of which only some rows are read."""
        return self.first.table_bytes + self.last.table_bytes

    @property
    def head_bytes(self) -> int:
        """Weights and states of what is not a layer."""
        ends = (self.first, self.last)
        return sum(block.weight_bytes + block.state_bytes for block in ends)


def chain(workload: Workload) -> Chain:
    """Return a workload as a chain of layers.

    Raises:
        UnsupportedOpError: its weights' names show no layers, the layers differ, or one runs in several places.
    """
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    groups = list(_grouped(workload, tensors))
    numbered = [i for i, (key, _) in enumerate(groups) if key]
    if not numbered:
        raise UnsupportedOpError(
            f"no weight of '{workload.name}' has a numbered name such as 'layers.0.up', so its layers are unknown; "
            f"plan it for one machine, or name its weights by layers"
        )
    keys = [key for key, _ in groups if key]
    if len(set(keys)) < len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise UnsupportedOpError(
            f"'{twice}' of '{workload.name}' runs in several places, so it is no layer of a chain; plan the model for "
            f"one machine"
        )
    lifetimes = _lifetimes(workload)
    blocks = _blocks(groups, tensors, lifetimes)
    layers = blocks[numbered[0] : numbered[-1] + 1]
    return Chain(
        name=workload.name,
        first=_sum("first", blocks[: numbered[0]]),
        layer=_alike(layers, workload.name),
        num_layers=len(layers),
        last=_sum("last", blocks[numbered[-1] + 1 :]),
    )


def _grouped(
    workload: Workload, tensors: dict[str, TensorSpec]
) -> Iterator[tuple[str, list[OpSpec]]]:
    """Yield ``(the layer's name, or '' for the head, its ops)`` in order."""
    layers = [_key(op, tensors) for op in workload.ops]
    last = max((i for i, key in enumerate(layers) if key), default=-1)
    current, ops = "", list[OpSpec]()
    for i, (op, key) in enumerate(zip(workload.ops, layers, strict=True)):
        # In between, what has no number of its own belongs to the layer that it stands in.
        now = key or (current if i <= last else "")
        if i > last and (not _weights(op, tensors) and current):
            now = current
        if now != current:
            if ops:
                yield current, ops
            current, ops = now, []
        ops.append(op)
    if ops:
        yield current, ops


def _weights(op: OpSpec, tensors: dict[str, TensorSpec]) -> list[str]:
    return [name for name in op.reads if tensors[name].kind is TensorKind.WEIGHT]


def _key(op: OpSpec, tensors: dict[str, TensorSpec]) -> str:
    """Return the layer that an op's weights name: ``model.layers.3``; empty where they name none, or several."""
    matches = (_NUMBERED.match(name) for name in _weights(op, tensors))
    keys = {match.group(1) for match in matches if match}
    return keys.pop() if len(keys) == 1 else ""


def _lifetimes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Return the first write and the last read of what ops make, by op."""
    spans: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(workload.ops):
        for name in op.writes:
            begun, ended = spans.get(name, (i, i))
            spans[name] = (begun, ended)
        for name in op.reads:
            if name in spans:
                spans[name] = (spans[name][0], i)
    return spans


def _blocks(
    groups: Sequence[tuple[str, list[OpSpec]]],
    tensors: dict[str, TensorSpec],
    lifetimes: dict[str, tuple[int, int]],
) -> list[Block]:
    blocks = []
    end = 0
    seen: set[str] = set()
    passing = {n: span for n, span in lifetimes.items() if tensors[n].kind not in PERSISTENT}
    for key, ops in groups:
        end += len(ops)
        out = sum(
            tensors[name].size_bytes
            for name, (begun, ended) in passing.items()
            if begun < end <= ended
        )
        blocks.append(_block(key, ops, tensors, seen, out))
    return blocks


def _block(
    key: str, ops: Sequence[OpSpec], tensors: dict[str, TensorSpec], seen: set[str], out: int
) -> Block:
    """Return the block of ``ops``; ``seen`` collects what has been counted, so that tied weights count once."""
    held = dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes))
    new = [tensors[name] for name in held if name not in seen]
    seen.update(held)
    weights = [t for t in new if t.kind is TensorKind.WEIGHT]
    tables = {name for op in ops for name in op.gathers}
    tables -= {name for op in ops for name in op.reads if name not in op.gathers}
    written = {name for op in ops for name in op.writes if tensors[name].kind not in PERSISTENT}
    silent = any(not (op.flops or op.read_bytes or op.write_bytes) for op in ops)
    times = [max(op.time_s.values(), default=0.0) for op in ops]
    return Block(
        name=key,
        weight_bytes=sum(t.size_bytes for t in weights if t.name not in tables),
        table_bytes=sum(t.size_bytes for t in weights if t.name in tables),
        state_bytes=sum(t.size_bytes for t in new if t.kind is TensorKind.STATE),
        flops=sum(op.flops for op in ops),
        moved_bytes=sum(op.read_bytes + op.write_bytes for op in ops),
        num_ops=len(ops),
        out_bytes=out,
        saved_bytes=sum(tensors[name].size_bytes for name in written),
        workspace_bytes=max((op.workspace_bytes for op in ops), default=0),
        time_s=sum(times) if silent and any(times) else None,
    )


def _sum(name: str, blocks: Iterable[Block]) -> Block:
    held = list(blocks)
    times = [block.time_s for block in held if block.time_s is not None]
    return Block(
        name=name,
        weight_bytes=sum(block.weight_bytes for block in held),
        table_bytes=sum(block.table_bytes for block in held),
        state_bytes=sum(block.state_bytes for block in held),
        flops=sum(block.flops for block in held),
        moved_bytes=sum(block.moved_bytes for block in held),
        num_ops=sum(block.num_ops for block in held),
        out_bytes=held[-1].out_bytes if held else 0,
        saved_bytes=sum(block.saved_bytes for block in held),
        workspace_bytes=max((block.workspace_bytes for block in held), default=0),
        time_s=sum(times) if times else None,
    )


_NUMBERS = ("weight_bytes", "table_bytes", "state_bytes", "flops", "moved_bytes", "saved_bytes")


def _alike(layers: Sequence[Block], workload: str) -> Block:
    """Return the largest of each number over the layers; raises ``UnsupportedOpError`` where they differ."""
    for field in _NUMBERS:
        values = [getattr(layer, field) for layer in layers]
        low, high = min(values), max(values)
        if high - low > _ALIKE * high:
            small, large = layers[values.index(low)].name, layers[values.index(high)].name
            raise UnsupportedOpError(
                f"the layers of '{workload}' are not alike: {field} is {low} in '{small}' and {high} in '{large}'; "
                f"plans over hosts are for layers that repeat, so plan this model for one machine"
            )
    times = [layer.time_s for layer in layers if layer.time_s is not None]
    return Block(
        name="layer",
        **{field: max(getattr(layer, field) for layer in layers) for field in _NUMBERS},
        num_ops=max(layer.num_ops for layer in layers),
        out_bytes=max(layer.out_bytes for layer in layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        time_s=max(times) if times else None,
    )
