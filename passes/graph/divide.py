"""Divide: large linear layers become tiles or parts, and embeddings fetch their rows by themselves.

A tile is some rows of a weight, that is, some output features of the op that reads it: the tiles of an
op are computed one after the other and together write the op's output, which is born with the first.
A part, too, but it makes a tensor of its own, so that another processor may compute it; an op of the name of the
whole joins them. Parts stay apart through the pointwise ops behind them, and where a layer in parts reads the whole,
each processor joins it for itself: so both send the other their parts at once, and nobody sends the whole.
A gathered weight is no longer read as a tensor; its rows are part of the op that needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gascompile.core.machine import Machine
from gascompile.core.tiles import Tile, parse_tile
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.formulas.gathers import gather_time_s, gathered
from gascompile.cost_models.formulas.op_time import op_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What to divide."""

    tile_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of one tile, per weight that is tiled."""
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Rows before which a part ends and the next begins, ascending, per weight that is in parts."""
    gathered: frozenset[str] = frozenset()
    """Weights whose rows are read one by one wherever an op allows it."""
    gather_tier: str = ""
    """Where those rows lie; empty for the usual tier."""


def divide(workload: Workload, machine: Machine, division: Division) -> Workload:
    """Return ``workload`` with the ops and weights that ``division`` names divided.

    A weight that an op needs whole stays whole. A divided op's seconds, FLOPs and bytes are shared out
    by rows, and each tile or part pays the launch again; a gather adds the seconds of its reads, and what joins parts
    those of writing the result once more.
    """
    gathering = [_gather(op, division, machine) for op in workload.ops]
    rows = _tileable_rows(gathering)
    weights = {tensor.name for tensor in workload.tensors if tensor.kind == TensorKind.WEIGHT}
    cuts = {name: bounds for name, bounds in division.cuts.items() if name in weights}
    parts = _part_tiles(gathering, cuts)
    apart = _Apart(workload, gathering, parts)
    tiles = {
        name: _tiles(name, rows[name], tile_rows)
        for name, tile_rows in division.tile_rows.items()
        if name in rows and name not in parts
    }
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    overhead_s = {rate.device: rate.op_overhead_s for rate in machine.memory}
    ops: list[OpSpec] = []
    made: list[TensorSpec] = []
    for op in gathering:
        weight = next((name for name in op.splits if name in tiles), None)
        if bounds := apart.of.get(f"%{op.name}"):
            made += _made(op, bounds, sizes)
            in_parts = list(_op_parts(op, bounds, apart, overhead_s))
            ops += in_parts
            for name in apart.joins(op):
                ops.append(_join(op, name, in_parts[::-1], sizes, machine))
                if (join := parse_tile(name)) is not None:
                    made += _made(op, (join,), sizes)
        else:
            ops += [op] if weight is None else _op_tiles(op, weight, tiles[weight], overhead_s)
    tiles.update(parts)
    tensors: list[TensorSpec] = []
    for tensor in workload.tensors:
        if tensor.name not in apart.of or tensor.name in apart.whole:
            tensors += (
                _weight_tiles(tensor, tiles[tensor.name]) if tensor.name in tiles else [tensor]
            )
    return replace(workload, tensors=(*tensors, *made), ops=tuple(ops))


class _Apart:
    """Which results are in parts, and who joins them."""

    def __init__(
        self, workload: Workload, ops: Sequence[OpSpec], parts: Mapping[str, Sequence[Tile]]
    ) -> None:
        """Know the linear layers in parts, and find the pointwise ops that take parts as they are."""
        writers = Counter(name for op in ops for name in dict.fromkeys(op.writes))
        viewed = {name for op in ops if not op.writes for name in op.reads}
        self._fixed = {name for name, count in writers.items() if count == 1} - viewed
        """What nobody changes, and nobody looks at but as it is."""
        self.of: dict[str, Sequence[Tile]] = {}
        """The parts of each result that is in some, by their features."""
        self.whole = {t.name for t in workload.tensors if t.kind == TensorKind.OUTPUT}
        """What is needed as a whole where the tier that computes is."""
        self.elsewhere: set[str] = set()
        """What is needed as a whole by another processor's part of a layer."""
        layers: set[str] = set()
        for op in ops:
            own, bounds = f"%{op.name}", None
            if weights := [name for name in op.cuts if name in parts]:
                bounds = parts[weights[0]]
                layers.add(op.name)
            elif op.cuts and self.of.keys() & self._fixed >= op.cuts.keys():
                first, *others = (self.of[name] for name in op.cuts)
                bounds = first if all(_same_rows(first, other) for other in others) else None
            if bounds is not None:
                self.of[own] = [bound._replace(base=op.name) for bound in bounds]
            is_pointwise = bounds is not None and op.name not in layers
            self.whole.update(() if is_pointwise else (*op.reads, *op.writes[bounds is not None :]))
            if op.name in layers:
                self.elsewhere.update(self._fixed.intersection(op.reads))

    def joins(self, op: OpSpec) -> Iterator[str]:
        """Yield the names of the ops that join the parts of ``op``, another processor's first."""
        own = f"%{op.name}"
        if own in self.elsewhere:
            yield Tile(op.name, 0, self.of[own][-1].end).name
        if own in self.whole:
            yield op.name

    def read(self, op: OpSpec, part: Tile) -> Iterator[str]:
        """Yield what a part of ``op`` reads; the first one is that of the tier that computes."""
        for name in op.reads:
            if name in op.cuts and name in self.of:
                yield f"%{part._replace(base=name[1:]).name}"
            elif name in op.cuts:
                yield part._replace(base=name).name
            elif part.begin and name in self.of and name in self.elsewhere:
                yield f"%{Tile(name[1:], 0, self.of[name][-1].end).name}"
            else:
                yield name


def _same_rows(one: Sequence[Tile], other: Sequence[Tile]) -> bool:
    return [part[1:] for part in one] == [part[1:] for part in other]


def division_of(divided: Workload) -> Division:
    """Return how a workload is divided, by the names of its tensors and ops."""
    ends: dict[str, list[int]] = {}
    for tensor in divided.tensors:
        tile = parse_tile(tensor.name) if tensor.kind == TensorKind.WEIGHT else None
        if tile is not None:
            ends.setdefault(tile.base, []).append(tile.end)
    in_parts = {
        tile.base
        for op in divided.ops
        for tile in map(parse_tile, op.reads)
        if tile is not None and f"%{op.name}" in op.writes
    }
    return Division(
        tile_rows={
            name: min(rows) for name, rows in ends.items() if name not in in_parts and min(rows)
        },
        cuts={name: tuple(sorted(ends[name])[:-1]) for name in ends if name in in_parts},
        gathered=frozenset(name for op in divided.ops for name in gathered(op)),
        gather_tier=next((op.gather_tier for op in divided.ops if gathered(op)), ""),
    )


def joined_ops(ops: Iterable[OpSpec]) -> frozenset[str]:
    """Return the names of the ops that join parts of what they stand for."""
    names = {op.name for op in ops}
    bases = {tile.base for name in names if (tile := parse_tile(name)) is not None}
    return frozenset(bases & names)


def part_tensors(ops: Iterable[OpSpec]) -> frozenset[str]:
    """Return the tensors that parts of ops read in parts, or make: rows of weights, features of results."""
    parts = (op for op in ops if parse_tile(op.name) is not None and f"%{op.name}" in op.writes)
    touched = (name for op in parts for name in (*op.reads, *op.writes))
    return frozenset(name for name in touched if parse_tile(name) is not None)


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


def _part_tiles(
    ops: Sequence[OpSpec], cuts: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Tile]]:
    """Return the parts of every weight and bias that is in parts, as all ops which read it can take it so."""
    wanted = {
        name: bounds
        for op in ops
        for name, bounds in _bounds(op, cuts).items()
        if bounds and bounds[0] > 0 and bounds[-1] < op.cuts[name]
    }
    rows = {name: count for op in ops for name, count in op.cuts.items()}
    while True:
        # Who is cut elsewhere than what is read with it, or read by an op that needs it whole, stays whole.
        failing = {
            name
            for op in ops
            for name in op.reads
            if name in wanted
            and any(wanted.get(other) != wanted[name] for other in (*op.cuts, name))
        } | {name for op in ops for name in op.reads if name in wanted and name not in op.cuts}
        if not failing:
            break
        wanted = {name: bounds for name, bounds in wanted.items() if name not in failing}
    return {
        name: [Tile(name, begin, end) for begin, end in pairwise((0, *bounds, rows[name]))]
        for name, bounds in wanted.items()
    }


def _bounds(op: OpSpec, cuts: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return where all that an op may be cut along is cut: where its weight is."""
    weight = next(iter(op.cuts), "")
    return dict.fromkeys(op.cuts, cuts[weight]) if weight in cuts else {}


def _tiles(name: str, rows: int, tile_rows: int) -> list[Tile]:
    return [Tile(name, begin, min(begin + tile_rows, rows)) for begin in range(0, rows, tile_rows)]


def _op_tiles(
    op: OpSpec, weight: str, tiles: list[Tile], overhead_s: Mapping[str, float]
) -> Iterator[OpSpec]:
    for tile in tiles:
        yield _op_rows(op, tile, (weight,), op.splits[weight], overhead_s)


def _op_parts(
    op: OpSpec, bounds: Sequence[Tile], apart: _Apart, overhead_s: Mapping[str, float]
) -> Iterator[OpSpec]:
    """Yield the parts of an op, the last rows first: another processor has those, and begins while this one does."""
    for part in reversed(bounds):
        made = _op_rows(op, part, (), bounds[-1].end, overhead_s)
        yield replace(made, reads=tuple(apart.read(op, part)), writes=(f"%{made.name}",))


def _op_rows(
    op: OpSpec,
    tile: Tile,
    divided: Collection[str],
    rows: int,
    overhead_s: Mapping[str, float],
) -> OpSpec:
    """Return what ``op`` does with some rows of what it is divided along."""
    share = (tile.end - tile.begin) / rows
    return replace(
        op,
        name=Tile(op.name, tile.begin, tile.end).name,
        time_s={
            device: share * max(0.0, time_s - overhead_s.get(device, 0.0))
            + min(time_s, overhead_s.get(device, 0.0))
            for device, time_s in op.time_s.items()
        },
        reads=tuple(
            Tile(name, tile.begin, tile.end).name if name in divided else name for name in op.reads
        ),
        flops=round(op.flops * share),
        read_bytes=round(op.read_bytes * share),
        write_bytes=round(op.write_bytes * share),
        splits={},
        cuts={},
    )


def _join(
    op: OpSpec, name: str, parts: Sequence[OpSpec], sizes: Mapping[str, int], machine: Machine
) -> OpSpec:
    """Return the op ``name`` that makes the whole result of the parts of ``op``, in the order of rows.

    It reads and writes each byte once.
    """
    size_bytes = sizes[f"%{op.name}"]
    moved = {"flops": 0, "read_bytes": size_bytes, "write_bytes": size_bytes}
    return OpSpec(
        name=name,
        time_s={
            device: op_time_s(**moved, dtype="", device=device, machine=machine)
            for device in op.time_s
        },
        reads=tuple(name for part in parts for name in part.writes),
        writes=(f"%{name}",),
        read_bytes=size_bytes,
        write_bytes=size_bytes,
    )


def _made(op: OpSpec, parts: Sequence[Tile], sizes: Mapping[str, int]) -> Iterator[TensorSpec]:
    """Yield the tensors that the parts of an op make."""
    row_bytes = sizes[f"%{op.name}"] // parts[-1].end
    for part in parts:
        yield TensorSpec(
            name=f"%{Tile(op.name, part.begin, part.end).name}",
            size_bytes=row_bytes * (part.end - part.begin),
            kind=TensorKind.ACTIVATION,
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
