"""Diff: what distinguishes two plans, the largest difference first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Fetch, Offload, Prefetch, Recompute, Reload
from gascompile.core.tiles import base_name, parse_tile
from gascompile.core.workload import TensorKind
from gascompile.passes.graph.divide import part_tensors

_ROUNDING = 1e-9  # share by which equal seconds may differ in two files


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity that both plans have; ``None`` where one of them lacks it."""

    name: str
    unit: str
    """``s``, ``bytes``, or empty for a word."""
    before: float | str | None
    after: float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeChange:
    """A tensor that lives elsewhere."""

    tensor: str
    kind: TensorKind
    size_bytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveChange:
    """A tensor of which another number of bytes moves per iteration."""

    tensor: str
    size_bytes: int
    before: Mapping[str, int]
    """Bytes per link, and those that come back by computing them again under ``recompute``."""
    after: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteChange:
    """An op that runs elsewhere, or takes another time."""

    op: str
    before: str
    after: str
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What distinguishes plan ``b`` from plan ``a``; every list has its largest difference first."""

    before: str
    """What plan ``a`` is for: workload, machine and strategy."""
    after: str
    same_workload: bool
    """Else tensors and ops are compared by name, as far as both plans have them."""
    change_s: float
    """Seconds per iteration that ``b`` takes more."""
    summary: tuple[Change, ...]
    """Time, machine, budgets, peaks, bytes moved; only what differs."""
    homes: tuple[HomeChange, ...]
    moves: tuple[MoveChange, ...]
    sites: tuple[SiteChange, ...]
    only_before: tuple[str, ...]
    """Tensors and ops that ``b`` does not have."""
    only_after: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether the two plans do the same."""
        lists = (self.summary, self.homes, self.moves, self.sites)
        return self.same_workload and not any((*lists, self.only_before, self.only_after))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A tensor in one plan, its tiles together."""

    kind: TensorKind
    size_bytes: int
    home: str
    moved_bytes: Mapping[str, int]


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Return what is different in ``b``; pure. Tiles are compared as the weights and ops they are part of."""
    placed_a, placed_b = _placed(a), _placed(b)
    ops_a, ops_b = _ops(a), _ops(b)
    seconds = (a.certificate.predicted_s, b.certificate.predicted_s)
    return PlanDiff(
        before=_title(a),
        after=_title(b),
        same_workload=_same_workload(a, b, placed_a, placed_b),
        change_s=0.0 if _same(*seconds) else seconds[1] - seconds[0],
        summary=tuple(_summary(a, b)),
        homes=tuple(
            change
            for change in _homes(placed_a, placed_b)
            if (change.before, change.after) != (a.machine.compute_tier, b.machine.compute_tier)
        ),
        moves=_moves(placed_a, placed_b),
        sites=_sites(ops_a, ops_b),
        only_before=_missing((placed_a, ops_a), (placed_b, ops_b)),
        only_after=_missing((placed_b, ops_b), (placed_a, ops_a)),
    )


def _same_workload(
    a: Plan, b: Plan, placed_a: Mapping[str, _Placed], placed_b: Mapping[str, _Placed]
) -> bool:
    """Whether the plans are of one model; each may take other seconds and divide it in its own way."""
    sizes_a = {name: (placed.kind, placed.size_bytes) for name, placed in placed_a.items()}
    sizes_b = {name: (placed.kind, placed.size_bytes) for name, placed in placed_b.items()}
    names = [dict.fromkeys(base_name(op.name) for op in plan.ops) for plan in (a, b)]
    return a.workload.name == b.workload.name and sizes_a == sizes_b and names[0] == names[1]


def _missing(
    these: tuple[Mapping[str, object], ...], those: tuple[Mapping[str, object], ...]
) -> tuple[str, ...]:
    """Return the tensors and the ops of these that those lack."""
    return tuple(
        name
        for some, others in zip(these, those, strict=True)
        for name in some
        if name not in others
    )


def _placed(plan: Plan) -> dict[str, _Placed]:
    """Return the tensors of a plan; one in tiles is where its tiles are, and parts of results are nobody's."""
    moved = _moved_bytes(plan)
    parts: dict[str, list[str]] = {}
    for name in plan.tensors:
        if (base := base_name(name)) == name or base not in plan.tensors:
            parts.setdefault(base, []).append(name)
    placed: dict[str, _Placed] = {}
    for base, names in parts.items():
        homes: dict[str, int] = {}
        for name in names:
            tensor = plan.tensors[name]
            homes[tensor.home] = homes.get(tensor.home, 0) + tensor.size_bytes
        total = sum(homes.values())
        shares = (f"{tier} {size / total:.0%}" for tier, size in sorted(homes.items()) if total)
        placed[base] = _Placed(
            kind=plan.tensors[names[0]].kind,
            size_bytes=total,
            home=next(iter(homes)) if len(homes) == 1 else ", ".join(shares),
            moved_bytes=moved.get(base, {}),
        )
    return placed


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _ROUNDING * max(abs(a), abs(b))


def _title(plan: Plan) -> str:
    return f"{plan.workload.name} on {plan.machine.name}, {plan.strategy}"


# ---------------------------------------------------------------- quantities


def _summary(a: Plan, b: Plan) -> Iterable[Change]:
    """Yield what differs: first what came out, then what went in, then what it takes."""
    certificate_a, certificate_b = a.certificate, b.certificate
    yield from _change("predicted", "s", certificate_a.predicted_s, certificate_b.predicted_s)
    yield from _change("workload", "", a.workload.name, b.workload.name)
    yield from _change("machine", "", a.machine.name, b.machine.name)
    if a.machine.name == b.machine.name:
        yield from _change("links", "", _links(a.machine), _links(b.machine))
    yield from _changes("budget of", a.budget_bytes, b.budget_bytes)
    yield from _changes("peak of", a.peak_bytes, b.peak_bytes)
    yield from _changes("moved over", a.link_bytes, b.link_bytes)
    yield from _changes("arena in", a.arena_bytes, b.arena_bytes)
    yield from _change("lower bound", "s", certificate_a.lower_bound_s, certificate_b.lower_bound_s)
    yield from _change("physical limit", "s", certificate_a.limit_s, certificate_b.limit_s)
    yield from _change("set by", "", certificate_a.binding, certificate_b.binding)
    yield from _change("strategy", "", a.strategy, b.strategy)
    yield from _change("form", "", _form(a), _form(b))


def _form(plan: Plan) -> str:
    """Return how the plan divides its workload, in words."""
    apart = part_tensors(plan.workload.ops)
    in_parts = sum(t.kind == TensorKind.WEIGHT for name, t in plan.tensors.items() if name in apart)
    tiles = sum(parse_tile(name) is not None for name in plan.tensors.keys() - apart)
    rows = sum(name not in op.reads for op in plan.workload.ops for name in op.gathers)
    parts = [f"{tiles} tiles"] * bool(tiles) + [f"{in_parts} parts"] * bool(in_parts)
    parts += [f"{rows} ops gather rows"] * bool(rows)
    return ", ".join(parts) or "whole weights"


def _links(machine: Machine) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.4g} GB/s" for link in machine.links
    )


def _change(
    name: str, unit: str, before: float | str | None, after: float | str | None
) -> Iterable[Change]:
    if before == after:
        return
    if isinstance(before, float) and isinstance(after, float) and _same(before, after):
        return
    yield Change(name=name, unit=unit, before=before, after=after)


def _changes(name: str, before: Mapping[str, int], after: Mapping[str, int]) -> Iterable[Change]:
    keys = dict.fromkeys((*before, *after))
    for key in sorted(keys, key=lambda key: -abs(after.get(key, 0) - before.get(key, 0))):
        if before.get(key, 0) != after.get(key, 0):
            yield from _change(f"{name} {key}", "bytes", before.get(key), after.get(key))


# ---------------------------------------------------------------- tensors and ops


def _homes(a: Mapping[str, _Placed], b: Mapping[str, _Placed]) -> tuple[HomeChange, ...]:
    changes = [
        HomeChange(
            tensor=name,
            kind=placed.kind,
            size_bytes=placed.size_bytes,
            before=a[name].home,
            after=placed.home,
        )
        for name, placed in b.items()
        if name in a and a[name].home != placed.home
    ]
    return tuple(sorted(changes, key=lambda change: -change.size_bytes))


def _moves(a: Mapping[str, _Placed], b: Mapping[str, _Placed]) -> tuple[MoveChange, ...]:
    changes = [
        MoveChange(
            tensor=name,
            size_bytes=placed.size_bytes,
            before=a[name].moved_bytes,
            after=placed.moved_bytes,
        )
        for name, placed in b.items()
        if name in a and a[name].moved_bytes != placed.moved_bytes
    ]

    def change_bytes(change: MoveChange) -> int:
        return abs(sum(change.after.values()) - sum(change.before.values()))

    return tuple(sorted(changes, key=lambda change: (-change_bytes(change), -change.size_bytes)))


def _moved_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """Return per tensor the bytes that move over each link or are computed again."""
    moved_bytes: dict[str, dict[str, int]] = {}
    for step in plan.steps:
        if isinstance(step, (Fetch, Prefetch, Reload, Offload)):
            names: tuple[str, ...] = (step.tensor,)
            way = step.link
        elif isinstance(step, Recompute):
            names, way = plan.workload.ops[step.source].writes, "recompute"
        else:
            continue
        for name in names:
            moved = moved_bytes.setdefault(base_name(name), {})
            moved[way] = moved.get(way, 0) + plan.tensors[name].size_bytes
    return moved_bytes


def _ops(plan: Plan) -> dict[str, tuple[str, float]]:
    """Return site and seconds of each op, its tiles together."""
    site_and_time: dict[str, tuple[str, float]] = {}
    for op in plan.ops:
        name = base_name(op.name)
        sites, time_s = site_and_time.get(name, (op.site, 0.0))
        sites = sites if op.site in sites.split(", ") else f"{sites}, {op.site}"
        site_and_time[name] = (sites, time_s + op.time_s)
    return site_and_time


def _sites(
    a: Mapping[str, tuple[str, float]], b: Mapping[str, tuple[str, float]]
) -> tuple[SiteChange, ...]:
    changes = [
        SiteChange(op=name, before=a[name][0], after=site, before_s=a[name][1], after_s=time_s)
        for name, (site, time_s) in b.items()
        if name in a and (a[name][0] != site or not _same(a[name][1], time_s))
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.after_s - change.before_s)))
