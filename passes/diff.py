"""Diff: what distinguishes two plans, the largest difference first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gascompile.ir import (
    Machine,
    Offload,
    Plan,
    Prefetch,
    Recompute,
    Reload,
    TensorKind,
)

_ROUNDING = 1e-9


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
    """A tensor that moves another number of times per iteration."""

    tensor: str
    size_bytes: int
    before: Mapping[str, int]
    """Number of transfers per link, and of reruns under ``recompute``."""
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


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Return what is different in ``b``; pure."""
    names_a, names_b = _names(a), _names(b)
    common = [name for name in a.tensors if name in b.tensors]
    seconds = (a.certificate.predicted_s, b.certificate.predicted_s)
    return PlanDiff(
        before=_title(a),
        after=_title(b),
        same_workload=a.workload == b.workload,
        change_s=0.0 if _same(*seconds) else seconds[1] - seconds[0],
        summary=tuple(_summary(a, b)),
        homes=_homes(a, b, common),
        moves=_moves(a, b, common),
        sites=_sites(a, b),
        only_before=tuple(name for name in names_a if name not in names_b),
        only_after=tuple(name for name in names_b if name not in names_a),
    )


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _ROUNDING * max(abs(a), abs(b))


def _title(plan: Plan) -> str:
    return f"{plan.workload.name} on {plan.machine.name}, {plan.strategy}"


def _names(plan: Plan) -> dict[str, None]:
    names = [*plan.tensors, *(op.name for op in plan.ops)]
    return dict.fromkeys(names)


# ---------------------------------------------------------------- quantities


def _summary(a: Plan, b: Plan) -> Iterable[Change]:
    """Yield what differs: first what came out, then what went in, then what it takes."""
    found_a, found_b = a.certificate, b.certificate
    yield from _change("predicted", "s", found_a.predicted_s, found_b.predicted_s)
    yield from _change("workload", "", a.workload.name, b.workload.name)
    yield from _change("machine", "", a.machine.name, b.machine.name)
    if a.machine.name == b.machine.name:
        yield from _change("links", "", _links(a.machine), _links(b.machine))
    yield from _changes("budget of", a.budget_bytes, b.budget_bytes)
    yield from _changes("peak of", a.peak_bytes, b.peak_bytes)
    yield from _changes("moved over", a.link_bytes, b.link_bytes)
    yield from _changes("arena in", a.arena_bytes, b.arena_bytes)
    yield from _change("lower bound", "s", found_a.lower_bound_s, found_b.lower_bound_s)
    yield from _change("physical limit", "s", found_a.limit_s, found_b.limit_s)
    yield from _change("set by", "", found_a.binding, found_b.binding)
    yield from _change("strategy", "", a.strategy, b.strategy)


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
        yield from _change(f"{name} {key}", "bytes", before.get(key), after.get(key))


# ---------------------------------------------------------------- tensors and ops


def _homes(a: Plan, b: Plan, common: Iterable[str]) -> tuple[HomeChange, ...]:
    found = [
        HomeChange(
            tensor=name,
            kind=b.tensors[name].kind,
            size_bytes=b.tensors[name].size_bytes,
            before=a.tensors[name].home,
            after=b.tensors[name].home,
        )
        for name in common
        if a.tensors[name].home != b.tensors[name].home
    ]
    return tuple(sorted(found, key=lambda change: -change.size_bytes))


def _moves(a: Plan, b: Plan, common: Iterable[str]) -> tuple[MoveChange, ...]:
    moves_a, moves_b = _counts(a), _counts(b)
    found = [
        MoveChange(
            tensor=name,
            size_bytes=b.tensors[name].size_bytes,
            before=moves_a.get(name, {}),
            after=moves_b.get(name, {}),
        )
        for name in common
        if moves_a.get(name, {}) != moves_b.get(name, {})
    ]

    def moved_bytes(change: MoveChange) -> int:
        return change.size_bytes * abs(sum(change.after.values()) - sum(change.before.values()))

    return tuple(sorted(found, key=lambda change: (-moved_bytes(change), -change.size_bytes)))


def _counts(plan: Plan) -> dict[str, dict[str, int]]:
    """Return per tensor how often it moves over each link and is computed again."""
    found: dict[str, dict[str, int]] = {}
    for step in plan.steps:
        if isinstance(step, (Prefetch, Reload, Offload)):
            names: tuple[str, ...] = (step.tensor,)
            way = step.link
        elif isinstance(step, Recompute):
            names, way = plan.workload.ops[step.source].writes, "recompute"
        else:
            continue
        for name in names:
            counts = found.setdefault(name, {})
            counts[way] = counts.get(way, 0) + 1
    return found


def _sites(a: Plan, b: Plan) -> tuple[SiteChange, ...]:
    ops_a = {op.name: op for op in a.ops}
    found = [
        SiteChange(
            op=op.name,
            before=ops_a[op.name].site,
            after=op.site,
            before_s=ops_a[op.name].time_s,
            after_s=op.time_s,
        )
        for op in b.ops
        if op.name in ops_a and (ops_a[op.name].site, ops_a[op.name].time_s) != (op.site, op.time_s)
    ]
    return tuple(sorted(found, key=lambda change: -abs(change.after_s - change.before_s)))
