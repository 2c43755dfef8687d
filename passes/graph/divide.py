"""Divide: large linear layers become tiles, and embeddings fetch their rows by themselves.

A tile is some rows of a weight, that is, some output features of the op that reads it: the tiles of an
op are computed one after the other and together write the op's output, which is born with the first.
A gathered weight is no longer read as a tensor; its rows are part of the op that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gascompile.core.machine import Machine
from gascompile.core.tiles import Tile
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.formulas.gathers import gather_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What to divide."""

    tile_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of one tile, per weight that is tiled."""
    gathered: frozenset[str] = frozenset()
    """Weights whose rows are read one by one wherever an op allows it."""
    gather_tier: str = ""
    """Where those rows lie; empty for the usual tier."""


def divide(workload: Workload, machine: Machine, division: Division) -> Workload:
    """Return ``workload`` with the ops and weights that ``division`` names divided.

    A weight that an op needs whole stays whole. A divided op's seconds, FLOPs and bytes are shared out
    by rows, and each tile pays the launch again; a gather adds the seconds of its reads.
    """
    gathering = [_gather(op, division, machine) for op in workload.ops]
    rows = _tileable_rows(gathering)
    tiles = {
        name: _tiles(name, rows[name], tile_rows)
        for name, tile_rows in division.tile_rows.items()
        if name in rows
    }
    overhead_s = {rate.device: rate.op_overhead_s for rate in machine.memory}
    ops: list[OpSpec] = []
    for op in gathering:
        weight = next((name for name in op.splits if name in tiles), None)
        ops += [op] if weight is None else _op_tiles(op, weight, tiles[weight], overhead_s)
    tensors: list[TensorSpec] = []
    for tensor in workload.tensors:
        tensors += _weight_tiles(tensor, tiles[tensor.name]) if tensor.name in tiles else [tensor]
    return replace(workload, tensors=tuple(tensors), ops=tuple(ops))


def _gather(op: OpSpec, division: Division, machine: Machine) -> OpSpec:
    gathers = {
        name: size
        for name, size in op.gathers.items()
        if name in division.gathered and name in op.reads
    }
    if not gathers:
        return op
    tier = division.gather_tier
    waited_s = sum(gather_time_s(size, machine, tier) for size in gathers.values())
    return replace(
        op,
        reads=tuple(name for name in op.reads if name not in gathers),
        gather_tier=tier,
        time_s={device: time_s + waited_s for device, time_s in op.time_s.items()},
    )


def _tileable_rows(ops: list[OpSpec]) -> dict[str, int]:
    """Return the rows of every weight that all ops which read it can take in tiles."""
    rows: dict[str, int] = {}
    whole: set[str] = set()
    for op in ops:
        rows.update(op.splits)
        whole.update(name for name in op.reads if name not in op.splits)
        # An op is divided along one weight.
        whole.update(list(op.splits)[1:])
    return {name: count for name, count in rows.items() if name not in whole}


def _tiles(name: str, rows: int, tile_rows: int) -> list[Tile]:
    return [Tile(name, begin, min(begin + tile_rows, rows)) for begin in range(0, rows, tile_rows)]


def _op_tiles(
    op: OpSpec, weight: str, tiles: list[Tile], overhead_s: Mapping[str, float]
) -> Iterator[OpSpec]:
    rows = op.splits[weight]
    for tile in tiles:
        share = (tile.end - tile.begin) / rows
        yield replace(
            op,
            name=Tile(op.name, tile.begin, tile.end).name,
            time_s={
                device: share * max(0.0, time_s - overhead_s.get(device, 0.0))
                + min(time_s, overhead_s.get(device, 0.0))
                for device, time_s in op.time_s.items()
            },
            reads=tuple(tile.name if name == weight else name for name in op.reads),
            flops=round(op.flops * share),
            read_bytes=round(op.read_bytes * share),
            write_bytes=round(op.write_bytes * share),
            splits={},
        )


def _weight_tiles(tensor: TensorSpec, tiles: list[Tile]) -> Iterator[TensorSpec]:
    row_bytes = tensor.size_bytes // tiles[-1].end
    for tile in tiles:
        yield TensorSpec(
            name=tile.name,
            size_bytes=row_bytes * (tile.end - tile.begin),
            kind=TensorKind.WEIGHT,
            forms=tensor.forms,
        )
