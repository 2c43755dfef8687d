"""Routes: where ops run when some weights rest elsewhere, the copies between sites, and what these take.

An op is *sent* to another site when all its weights are. What it reads is copied there as soon as it is made, and
awaited by both sites before the op; what it writes is copied back before an op elsewhere needs it. An op without
weights stays with its inputs where that costs less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gascompile.core.steps import Compute, Offload, Reload, Step, Wait
from gascompile.core.tiles import base_name, is_tile, parse_tile
from gascompile.core.workload import OpSpec, TensorKind
from gascompile.cost_models.formulas.contention import contended, giving_s
from gascompile.passes.model.liveness import live_over
from gascompile.passes.model.problem import Problem


@dataclass(slots=True)
class SiteMoves:
    """Steps between sites, by where they stand."""

    after: dict[int, list[Step]] = field(default_factory=dict)
    """Right after an op."""
    before: dict[int, list[Step]] = field(default_factory=dict)
    """Right before an op; under the number of ops those at the end of the iteration."""

    alone: list[str] = field(default_factory=list)
    """What one site has waited for alone."""
    old: list[str] = field(default_factory=list)
    """Of that, what the tier that computes has had a layer, or a part of one, to do meanwhile."""

    def copy(self, begun: Offload | Reload, wait: Wait) -> None:
        """Add a copy, begun behind the op before ``begun.op`` and awaited right before another one."""
        self.after.setdefault(begun.op - 1, []).append(begun)
        self.before.setdefault(wait.op, []).append(wait)
        self.alone.extend([wait.tensor] * (wait.site is not None))

    def settle(self, op: int, *, is_layer: bool, is_whole: bool) -> None:
        """Let everybody wait before a whole op of the tier that computes for what one site has waited for alone.

        It does so once it has had a layer, or a part of one, to do meanwhile.
        """
        if is_layer:
            self.old += self.alone
            self.alone.clear()
        if is_whole:
            self.before.setdefault(op, []).extend(Wait(op=op, tensor=name) for name in self.old)
            self.old.clear()

    def merged(self, steps: Sequence[Step], num_ops: int) -> tuple[Step, ...]:
        """Return ``steps`` of one iteration with these among them."""
        merged: list[Step] = []
        for step in steps:
            if isinstance(step, Compute):
                merged.extend(self.before.get(step.op, ()))
            merged.append(step)
            if isinstance(step, Compute):
                merged.extend(self.after.get(step.op, ()))
        merged.extend(self.before.get(num_ops, ()))
        return tuple(merged)


@dataclass(frozen=True, slots=True)
class SiteRoute:
    """Where ops run, and the copies that this takes."""

    op_sites: tuple[str, ...]
    op_times_s: tuple[float, ...]
    moves: SiteMoves
    there: Mapping[str, tuple[int, int]]
    """Per tensor that is at the other site the first and the last op while it is."""


def closed(task: Problem, chosen: frozenset[int], tier: str) -> frozenset[int]:
    """Drop weights from ``chosen`` until each op that reads one of them reads no other weight."""
    kinds = {tensor.name: tensor.kind for tensor in task.workload.tensors}
    number = {weight.name: i for i, weight in enumerate(task.weights)}
    changed = _changed(task)
    ops = task.workload.ops
    while True:
        kept = frozenset(
            i
            for i in chosen
            if all(
                _can_run(ops[op], kinds, tier, changed)
                and all(
                    number.get(name) in chosen
                    for name in ops[op].reads
                    if kinds[name] == TensorKind.WEIGHT
                )
                for op in task.weights[i].uses
            )
        )
        if kept == chosen:
            return kept
        chosen = kept


def joins_elsewhere(op: OpSpec) -> bool:
    """Return whether ``op`` joins parts of a result for parts of layers at another site."""
    tile = parse_tile(op.name)
    return tile is not None and any(base_name(name) == f"%{tile.base}" for name in op.reads)


def _changed(task: Problem) -> frozenset[str]:
    """Return the tensors that several ops write: they stay where they are."""
    writers = Counter(name for op in task.workload.ops for name in dict.fromkeys(op.writes))
    return frozenset(name for name, count in writers.items() if count > 1)


def _can_run(
    op: OpSpec, kinds: Mapping[str, TensorKind], tier: str, changed: frozenset[str]
) -> bool:
    """Whether ``op`` has a time on ``tier`` and touches nothing that must stay where it is."""
    touched = (*op.reads, *op.writes)
    return (
        tier in op.time_s
        and not op.gathers
        and not is_tile(op.name, op.writes)
        and changed.isdisjoint(touched)
        and all(kinds[name] != TensorKind.STATE for name in touched)
        and all(kinds[name] != TensorKind.INPUT for name in op.writes)
    )


def own_times(task: Problem, route: SiteRoute) -> list[float]:
    """Return by how much each op moves the clock of the tier that computes on, weights at hand.

    An op elsewhere takes none of its time but where what follows waits for it; the last takes what is left.
    """
    own, contention = task.machine.compute_tier, task.machine.contention
    start_s, wake_s = (contention.start_s, contention.wake_s) if contention else (0.0, 0.0)
    now = dict.fromkeys((own, *route.op_sites), start_s) | {own: 0.0}
    arrived: dict[str, float] = {}
    waiting: dict[str, set[str]] = {}
    times_s: list[float] = []
    reached_s = 0.0
    computes = [Compute(op=i) for i in range(len(route.op_sites))]
    for step in route.moves.merged(computes, len(computes)):
        match step:
            case Compute():
                now[route.op_sites[step.op]] += route.op_times_s[step.op]
                times_s.append(now[own] - reached_s)
                reached_s = now[own]
            case Offload() | Reload():
                link = task.machine.link(step.link)
                now[link.source_tier] += giving_s(task.machine, step.size_bytes)
                begun_s = max(now[own], now[link.source_tier])
                arrived[step.tensor] = begun_s + link.transfer_time_s(step.size_bytes) + wake_s
                waiting[step.tensor] = {own, link.target_tier}
            case Wait():
                for site in (step.site,) if step.site else waiting[step.tensor]:
                    now[site] = max(now[site], arrived[step.tensor])
            case _:
                pass
    times_s[-1] += max(now.values()) - reached_s
    return times_s


def site_peak_bytes(task: Problem, tier: str, route: SiteRoute) -> int:
    """Return a bound on what activations and workspace take on ``tier`` at a time."""
    there = {name: range(first, last + 1) for name, (first, last) in route.there.items()}
    workspace = [
        spec.workspace_bytes if site == tier else 0
        for spec, site in zip(task.workload.ops, route.op_sites, strict=True)
    ]
    return max(live_over(task.workload, there, workspace), default=0)


def find_route(task: Problem, tier: str, sent: frozenset[str]) -> SiteRoute:
    """Decide where each op runs when the weights ``sent`` rest on ``tier``, and what is copied."""
    own = task.machine.compute_tier
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    kinds = {tensor.name: tensor.kind for tensor in task.workload.tensors}
    changed = _changed(task)
    out, back = task.machine.link(f"{own}->{tier}"), task.machine.link(f"{tier}->{own}")
    at: dict[str, set[str]] = {}
    made: dict[str, int] = {}
    there: dict[str, tuple[int, int]] = {}
    op_sites: list[str] = []
    moves = SiteMoves()

    def bring(i: int, name: str, site: str) -> None:
        link, kind = (out, Offload) if site == tier else (back, Reload)
        begun = kind(op=made[name] + 1, tensor=name, link=link.name, size_bytes=sizes[name])
        # Of a layer in parts the tier that computes does its own before it waits.
        is_alone = site == tier and parse_tile(task.workload.ops[i].name) is not None
        moves.copy(begun, Wait(op=i, tensor=name, site=tier if is_alone else None))
        at[name].add(site)

    for i, op in enumerate(task.workload.ops):
        held = [name for name in dict.fromkeys((*op.reads, *op.writes)) if name in at]
        weights = [name for name in op.reads if kinds[name] == TensorKind.WEIGHT]
        site = own
        is_sent = bool(weights) and all(name in sent for name in weights)
        if is_sent or (joins_elsewhere(op) and _can_run(op, kinds, tier, changed)):
            site = tier
        elif not weights and held and _can_run(op, kinds, tier, changed):
            away = [name for name in held if own not in at[name]]
            gain_s = sum(back.transfer_time_s(sizes[name]) for name in away)
            stays = len(away) == len(held) and op.time_s[tier] <= op.time_s[own] + gain_s
            site = tier if stays else own
        for name in held:
            if site not in at[name]:
                bring(i, name, site)
        for name in op.writes:
            if kinds[name] not in (TensorKind.WEIGHT, TensorKind.STATE, TensorKind.INPUT):
                at[name], made[name] = {site}, i
        for name in (*op.reads, *op.writes):
            if tier in at.get(name, ()):
                there[name] = (made[name], i)
        if site == own:
            moves.settle(i, is_layer=bool(weights), is_whole=parse_tile(op.name) is None)
        op_sites.append(site)
    end = len(op_sites)
    for name in [name for name in at if kinds[name] == TensorKind.OUTPUT and own not in at[name]]:
        bring(end, name, own)
    moves.settle(end, is_layer=True, is_whole=True)
    alone_s = [op.time_s[site] for op, site in zip(task.workload.ops, op_sites, strict=True)]
    times_s = tuple(contended(task.workload.ops, alone_s, op_sites, task.machine))
    return SiteRoute(tuple(op_sites), times_s, moves, there)
