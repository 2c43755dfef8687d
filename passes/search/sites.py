"""Sites: ops that run where their weights rest, because that is cheaper than moving the weights.

The GPU waits for weights that come over a link slower than the memory they rest in; the processor next to
that memory may be done with them sooner. An op is *sent* to another site when all its weights are. What
it reads is copied there and awaited, what it writes is copied back before an op elsewhere needs it;
an op without weights stays with its inputs where that costs less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gascompile.core.steps import Compute, Offload, Reload, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind
from gascompile.cost_models.simulate.events import running_sums, steady_seconds
from gascompile.cost_models.simulate.replay import compile_events
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.plan.emit import emit
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import best_staging, least_arena_bytes, time_bound_s
from gascompile.passes.search.strategies import family, homes

_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the weights of a tier that are sent with their ops."""
_FILL = (1.0, 0.95, 0.85)
"""Shares of the arena that residents may take."""
_FAMILIES = ("first_fit", "per_layer", "largest_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class SitedSchedule:
    """A schedule in which some ops run elsewhere."""

    task: Problem
    """The problem without the weights that do not move."""
    schedule: Schedule
    op_sites: tuple[str, ...]
    steps: tuple[Step, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Route:
    """Where ops run, and the copies that this takes."""

    op_sites: tuple[str, ...]
    op_times_s: tuple[float, ...]
    moves: Mapping[int, Sequence[Step]]
    """Per op the steps before it; those at the end of the iteration under the number of ops."""
    copies_s: Mapping[int, float]
    """Per op the seconds of its copies on links that nothing else uses."""


def sites(task: Problem, best_s: float) -> SitedSchedule | None:
    """Return the fastest schedule found with ops at other sites; ``None`` when none beats ``best_s``."""
    best: SitedSchedule | None = None
    for tier in _other_sites(task):
        for placement in _placements(task):
            for sent in _sent(task, placement, tier):
                found = _evaluate(task, placement, tier, sent, best.seconds if best else best_s)
                if found is not None:
                    best = found
    return best


def _other_sites(task: Problem) -> list[str]:
    """Return the tiers that ops can run on besides the one that computes."""
    own = task.machine.compute_tier
    links = {(link.source_tier, link.target_tier) for link in task.machine.links}
    return [
        tier
        for tier in task.machine.tiers
        if tier != own
        and (own, tier) in links
        and (tier, own) in links
        and any(tier in op.time_s for op in task.workload.ops)
    ]


def _placements(task: Problem) -> Iterator[Placement]:
    """Yield per family the largest sets of residents that fill a share of the arena."""
    seen: set[tuple[int | None, ...]] = set()
    for name in _FAMILIES:
        members = family(task, name)
        for share in _FILL:
            most_bytes = share * task.arena_limit_bytes
            fitting = [
                c
                for c in members
                if sum(task.weights[i].reserved_bytes for i in c.residents) <= most_bytes
            ]
            if not fitting:
                continue
            largest = max(
                fitting, key=lambda c: sum(task.weights[i].reserved_bytes for i in c.residents)
            )
            for placement in homes(task, largest.residents, "sites")[:1]:
                if placement.link_of not in seen:
                    seen.add(placement.link_of)
                    yield placement


def _sent(task: Problem, placement: Placement, tier: str) -> Iterator[frozenset[int]]:
    """Yield sets of weights that stay on ``tier``, their ops being sent there."""
    able = _able_weights(task, placement, tier)
    for share in _SHARES:
        count = round(share * len(able))
        if count:
            # Evenly spread, so that the links carry the others meanwhile.
            spread = {able[k * len(able) // count] for k in range(count)}
            yield _closed(task, frozenset(spread), tier)


def _able_weights(task: Problem, placement: Placement, tier: str) -> list[int]:
    """Return the weights resting on ``tier`` whose ops could all run there, in the order of use."""
    resting = frozenset(
        i
        for i in placement.streamed
        if (link := placement.link_of[i]) is not None and task.links[link].source_tier == tier
    )
    return sorted(_closed(task, resting, tier), key=lambda i: task.weights[i].uses)


def _closed(task: Problem, chosen: frozenset[int], tier: str) -> frozenset[int]:
    """Drop weights from ``chosen`` until each op that reads one of them reads no other weight."""
    kinds = {tensor.name: tensor.kind for tensor in task.workload.tensors}
    number = {weight.name: i for i, weight in enumerate(task.weights)}
    ops = task.workload.ops
    while True:
        kept = frozenset(
            i
            for i in chosen
            if all(
                _can_run(ops[op], kinds, tier)
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


def _can_run(op: OpSpec, kinds: Mapping[str, TensorKind], tier: str) -> bool:
    """Whether ``op`` has a time on ``tier`` and touches nothing that must stay where it is."""
    touched = (*op.reads, *op.writes)
    return tier in op.time_s and all(kinds[name] != TensorKind.STATE for name in touched)


def _evaluate(
    task: Problem, placement: Placement, tier: str, sent: frozenset[int], best_s: float
) -> SitedSchedule | None:
    if not sent:
        return None
    route = _route(task, tier, frozenset(task.weights[i].name for i in sent))
    if sum(route.op_times_s) >= best_s:
        return None
    reduced = _reduced(task, tier, sent, route)
    kept = [i for i in range(len(task.weights)) if i not in sent]
    rest = Placement(strategy="sites", link_of=tuple(placement.link_of[i] for i in kept))
    if reduced is None or time_bound_s(reduced, rest) >= best_s:
        return None
    if least_arena_bytes(reduced, rest)[0] > task.arena_limit_bytes:
        return None
    found = best_staging(reduced, rest, task.arena_limit_bytes)
    if found is None:
        return None
    steps = merge_steps(emit(reduced, found), route.moves, len(route.op_sites))
    events = compile_events(steps, route.op_times_s, task.machine, repeats=task.repeats)
    seconds = steady_seconds(events)
    if seconds >= best_s:
        return None
    return SitedSchedule(
        task=reduced, schedule=found, op_sites=route.op_sites, steps=steps, seconds=seconds
    )


def _reduced(task: Problem, tier: str, sent: frozenset[int], route: _Route) -> Problem | None:
    """Return the problem of moving the other weights while the sent ones rest."""
    room = dict(task.room_bytes)
    room[tier] -= sum(task.weights[i].size_bytes for i in sent) + _visiting_bytes(task, tier, route)
    if room[tier] < 0:
        return None
    times_s = tuple(
        time_s + route.copies_s.get(op, 0.0) for op, time_s in enumerate(route.op_times_s)
    )
    return replace(
        task,
        weights=tuple(weight for i, weight in enumerate(task.weights) if i not in sent),
        idle_homes={**task.idle_homes, **{task.weights[i].name: tier for i in sent}},
        room_bytes=room,
        op_times_s=times_s,
        sums_s=tuple(running_sums(times_s)),
    )


def _visiting_bytes(task: Problem, tier: str, route: _Route) -> int:
    """Return a bound on what activations and workspace take on ``tier`` at a time."""
    sizes = {
        tensor.name: tensor.size_bytes
        for tensor in task.workload.tensors
        if tensor.kind not in (TensorKind.WEIGHT, TensorKind.STATE, TensorKind.INPUT)
    }
    spans: dict[str, tuple[int, int]] = {}
    for op, (spec, site) in enumerate(zip(task.workload.ops, route.op_sites, strict=True)):
        if site == tier:
            for name in (*spec.reads, *spec.writes):
                spans[name] = (spans.get(name, (op, op))[0], op)
    last_read = {name: op for op, spec in enumerate(task.workload.ops) for name in spec.reads}
    change = [0] * (len(route.op_sites) + 2)
    for name, (first, _) in spans.items():
        change[first] += sizes.get(name, 0)
        change[last_read.get(name, len(route.op_sites)) + 1] -= sizes.get(name, 0)
    held = running_sums(change)[1:]
    workspace = [
        spec.workspace_bytes if site == tier else 0
        for spec, site in zip(task.workload.ops, route.op_sites, strict=True)
    ]
    return int(max((a + b for a, b in zip(held, workspace, strict=False)), default=0))


def _route(task: Problem, tier: str, sent: frozenset[str]) -> _Route:
    """Decide where each op runs when the weights ``sent`` rest on ``tier``, and what is copied."""
    own = task.machine.compute_tier
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    kinds = {tensor.name: tensor.kind for tensor in task.workload.tensors}
    out, back = task.machine.link(f"{own}->{tier}"), task.machine.link(f"{tier}->{own}")
    at: dict[str, set[str]] = {}
    op_sites: list[str] = []
    moves: dict[int, list[Step]] = {}
    copies_s: dict[int, float] = {}

    def bring(i: int, name: str, site: str) -> None:
        link = out if site == tier else back
        kind = Offload if site == tier else Reload
        moves.setdefault(i, []).append(
            kind(op=i, tensor=name, link=link.name, size_bytes=sizes[name])
        )
        moves[i].append(Wait(op=i, tensor=name))
        copies_s[i] = copies_s.get(i, 0.0) + link.transfer_time_s(sizes[name])
        at[name].add(site)

    for i, op in enumerate(task.workload.ops):
        held = [name for name in dict.fromkeys((*op.reads, *op.writes)) if name in at]
        weights = [name for name in op.reads if kinds[name] == TensorKind.WEIGHT]
        site = own
        if weights and all(name in sent for name in weights):
            site = tier
        elif not weights and held and _can_run(op, kinds, tier):
            away = [name for name in held if own not in at[name]]
            gain_s = sum(back.transfer_time_s(sizes[name]) for name in away)
            stays = len(away) == len(held) and op.time_s[tier] <= op.time_s[own] + gain_s
            site = tier if stays else own
        for name in held:
            if site not in at[name]:
                bring(i, name, site)
        for name in op.writes:
            if kinds[name] not in (TensorKind.WEIGHT, TensorKind.STATE, TensorKind.INPUT):
                at[name] = {site}
        op_sites.append(site)
    end = len(op_sites)
    for name in [name for name in at if kinds[name] == TensorKind.OUTPUT and own not in at[name]]:
        bring(end, name, own)
    return _Route(
        tuple(op_sites),
        tuple(op.time_s[site] for op, site in zip(task.workload.ops, op_sites, strict=True)),
        moves,
        copies_s,
    )


def merge_steps(
    steps: Sequence[Step], moves: Mapping[int, Sequence[Step]], num_ops: int
) -> tuple[Step, ...]:
    """Return ``steps`` with the moves before each op; those under ``num_ops`` come last."""
    merged: list[Step] = []
    for step in steps:
        if isinstance(step, Compute):
            merged.extend(moves.get(step.op, ()))
        merged.append(step)
    merged.extend(moves.get(num_ops, ()))
    return tuple(merged)
