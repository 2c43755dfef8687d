"""Sites: ops that run where their weights rest, because that is cheaper than moving the weights.

The GPU waits for weights that come over a link slower than the memory they rest in; the processor next to
that memory may be done with them sooner, and computes while the GPU does. Which weights are sent there is tried;
``site_routes`` says what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gascompile.core.op_sites import op_sites
from gascompile.core.steps import Step
from gascompile.cost_models.simulate.events import running_sums, steady_seconds
from gascompile.cost_models.simulate.replay import compile_events
from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.plan.emit import emit
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import (
    best_staging,
    least_arena_bytes,
    search,
    time_bound_s,
)
from gascompile.passes.search.site_order import reordered, site_order
from gascompile.passes.search.site_routes import (
    Route,
    closed,
    find_route,
    own_times,
    visiting_bytes,
)
from gascompile.passes.search.strategies import MANY_WEIGHTS, family, homes, strategies

Planner = Callable[[Problem], Schedule | None]

_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of the weights that can be sent with their ops, evenly spread: links carry the others meanwhile."""
_STREAMED = (0.0, 0.5, 1.0)
"""Of the weights that stay, how much comes over the link, where ops are given to who is done with them first."""
_FILL = (1.0, 0.95, 0.85)
"""Shares of the arena that residents may take."""
_FAMILIES = ("first_fit", "per_layer", "largest_first")
_SEARCHED = 2
"""Choices of ops whose other weights are planned as thoroughly as where nothing is sent."""
_SEARCHED_WORK = 20_000
"""Visits that are placed for each of these. [Empirical] For 201 weights of a Llama of 1.1B a search ends after 2,000;
with tiles of them it went on for ten seconds, and found nothing better."""
_TRIED_OPS = 300_000
"""Ops of the workload, once per trial of a weight. [Empirical] Some seven seconds on one core of an EPYC."""
_REORDERED = 2
"""Times that the ops of the best schedule are put in the order in which sites are done with them."""
_ORDER_GAIN = 1e-3
"""Of the time, that another order of the ops has to save."""
_PASSES = 3
"""Times that each weight is tried at the other site in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitedSchedule:
    """A schedule in which some ops run elsewhere."""

    task: Problem
    """The problem without the weights that do not move."""
    schedule: Schedule
    op_sites: tuple[str, ...]
    steps: tuple[Step, ...]
    seconds: float


def sites(
    task: Problem, best_s: float, fits: Callable[[SitedSchedule], bool]
) -> SitedSchedule | None:
    """Return the fastest schedule found with ops at other sites; ``None`` when none beats ``best_s``.

    Args:
        task: the problem with all ops on the tier that computes.
        best_s: seconds to beat.
        fits: whether the account of a schedule keeps the budget.
    """
    best: SitedSchedule | None = None
    for tier in _other_sites(task):
        found: list[tuple[float, tuple[int, ...]]] = []
        seen: set[frozenset[int]] = set()
        for sent in _sent(task, tier):
            if sent and sent not in seen:
                seen.add(sent)
                limit_s = best.seconds if best else best_s
                least_s, better = _best_with(task, tier, sent, limit_s, fits)
                best = better or best
                found.append((least_s, tuple(sorted(sent))))
        for least_s, chosen in sorted(found)[:_SEARCHED]:
            limit_s = best.seconds if best else best_s
            if least_s < limit_s:
                best = _searched(task, tier, frozenset(chosen), limit_s, fits) or best
        if best is not None and tier in best.op_sites:
            best = _in_time(task, tier, best, fits)
    return best


def sited(task: Problem, tier: str, sent: frozenset[int], plan: Planner) -> SitedSchedule | None:
    """Return a schedule of given ops at another site; ``None`` where that tier has no room, or ``plan`` finds none.

    Args:
        task: the problem with all ops on the tier that computes.
        tier: where weights rest, and ops that read nothing else run; see ``closed``.
        sent: those weights.
        plan: schedules the others.
    """
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    reduced = _reduced(task, tier, sent, route)
    return None if reduced is None else _sited(reduced, route, plan(reduced), math.inf)


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
    if not task.weights:
        yield Placement(strategy="sites", link_of=())
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


def _sent(task: Problem, tier: str) -> Iterator[frozenset[int]]:
    """Yield sets of weights that stay on ``tier``, their ops being sent there."""
    everything = frozenset(range(len(task.weights)))
    able = sorted(closed(task, everything, tier), key=lambda i: task.weights[i].uses)
    for share in _STREAMED:
        first = closed(task, _first_done(task, frozenset(able), tier, share), tier)
        yield first
        if len(able) < MANY_WEIGHTS:
            yield _improved(task, tier, first, able)
    for order in (able, able[::-1]):
        yield closed(task, _beyond_arena(task, order), tier)
    for share in _SHARES:
        count = round(share * len(able))
        spread = {able[k * len(able) // count] for k in range(count)}
        yield closed(task, frozenset(spread), tier)


def _beyond_arena(task: Problem, order: Sequence[int]) -> frozenset[int]:
    """Return all but the last weights of ``order`` that the arena holds beside those that are in none: none moves."""
    able = set(order)
    held = sum(w.reserved_bytes for i, w in enumerate(task.weights) if i not in able)
    kept = 0
    for weight in reversed(order):
        held += task.weights[weight].reserved_bytes
        if held > task.arena_limit_bytes:
            break
        kept += 1
    return frozenset(order[: len(order) - kept])


def _improved(
    task: Problem, tier: str, sent: frozenset[int], able: Sequence[int]
) -> frozenset[int]:
    """Return ``sent`` with weights added and removed, one by one, as long as that shortens what is certain."""
    best_s = _certain_s(task, tier, sent)
    left = _TRIED_OPS // max(1, len(task.workload.ops))
    for _ in range(_PASSES):
        before = sent
        for weight in able:
            left -= 1
            if left < 0:
                return sent
            changed = closed(task, sent ^ {weight}, tier)
            if changed != sent and (found_s := _certain_s(task, tier, changed)) < best_s:
                sent, best_s = changed, found_s
        if sent == before:
            break
    return sent


def _certain_s(task: Problem, tier: str, sent: frozenset[int]) -> float:
    """Return what an iteration takes at least: its ops and copies between sites, and what its link has to bring."""
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    kept_bytes = sum(w.size_bytes for i, w in enumerate(task.weights) if i not in sent and w.uses)
    moved_s, _ = physical_limit(
        0.0, kept_bytes, task.arena_limit_bytes, task.machine, task.room_bytes
    )
    return max(sum(own_times(task, route)), moved_s)


def _first_done(task: Problem, able: frozenset[int], tier: str, streamed: float) -> frozenset[int]:
    """Return the weights whose ops are given to ``tier``, in their order each to the site that is done with it first.

    Args:
        task: the problem.
        able: weights whose ops can run there.
        tier: the other site.
        streamed: share of the other weights' bytes that come over the link, in the order of their use.
    """
    own = task.machine.compute_tier
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    number = {weight.name: i for i, weight in enumerate(task.weights)}
    link = {own: task.machine.link(f"{tier}->{own}"), tier: task.machine.link(f"{own}->{tier}")}
    now = {own: 0.0, tier: 0.0}
    ready: dict[str, dict[str, float]] = {}
    sent: set[int] = set()
    kept: set[int] = set()
    link_free_s = 0.0
    for op in task.workload.ops:
        weights = [number[name] for name in dict.fromkeys(op.reads) if name in number]
        coming = [i for i in weights if i not in kept and i not in sent]
        load_s = sum(link[own].transfer_time_s(task.weights[i].size_bytes) for i in coming)
        done_s: dict[str, float] = {}
        for site in (own, tier):
            arrived_s = max(
                (
                    min(
                        at[site] if site in at else s + link[site].transfer_time_s(sizes[name])
                        for s in at.values()
                    )
                    for name in (*op.reads, *op.writes)
                    if (at := ready.get(name)) is not None
                ),
                default=0.0,
            )
            if site == own and coming:
                arrived_s = max(arrived_s, link_free_s + streamed * load_s)
            done_s[site] = max(now[site], arrived_s) + op.time_s.get(site, 0.0)
        can = all(i in able for i in weights) and tier in op.time_s
        goes = can and not kept.intersection(weights) and done_s[tier] < done_s[own]
        site = tier if (weights and sent.intersection(weights)) or goes else own
        if site == own:
            link_free_s += streamed * load_s
        (sent if site == tier else kept).update(weights)
        now[site] = done_s[site]
        ready.update({name: {site: done_s[site]} for name in op.writes})
    return frozenset(sent)


def _best_with(
    task: Problem,
    tier: str,
    sent: frozenset[int],
    best_s: float,
    fits: Callable[[SitedSchedule], bool],
) -> tuple[float, SitedSchedule | None]:
    """Return the fastest of some schedules with the weights ``sent`` at ``tier``; ``None`` when none beats ``best_s``.

    With it comes what any schedule with them takes at least; infinity where there is none.
    """
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    reduced = _reduced(task, tier, sent, route)
    if reduced is None or (least_s := _certain_s(task, tier, sent)) >= best_s:
        return math.inf, None
    best: SitedSchedule | None = None
    for placement in _placements(reduced):
        limit_s = best.seconds if best else best_s
        if time_bound_s(reduced, placement) >= limit_s:
            continue
        if least_arena_bytes(reduced, placement)[0] > reduced.arena_limit_bytes:
            continue
        staged = best_staging(reduced, placement, reduced.arena_limit_bytes)
        found = _sited(reduced, route, staged, limit_s)
        if found is not None and fits(found):
            best = found
    return least_s, best


def _searched(
    task: Problem,
    tier: str,
    sent: frozenset[int],
    best_s: float,
    fits: Callable[[SitedSchedule], bool],
) -> SitedSchedule | None:
    """Return the best schedule that ``search`` finds for the weights that are not sent, if it beats ``best_s``."""
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    reduced = _reduced(task, tier, sent, route)
    if reduced is None:
        return None
    staged = search(
        reduced, strategies(reduced), reduced.arena_limit_bytes, most_work=_SEARCHED_WORK
    )
    found = _sited(reduced, route, staged, best_s)
    return found if found is not None and fits(found) else None


def _in_time(
    task: Problem,
    tier: str,
    best: SitedSchedule,
    fits: Callable[[SitedSchedule], bool],
) -> SitedSchedule:
    """Return the schedule with its ops in the order in which sites are done with them, where that is faster."""
    sent = {weight.name for weight in task.weights} - {w.name for w in best.task.weights}
    for _ in range(_REORDERED):
        order = site_order(best.task.workload, best.op_sites, task.machine)
        task = reordered(task, order)
        chosen = frozenset(i for i, weight in enumerate(task.weights) if weight.name in sent)
        limit_s = best.seconds * (1 - _ORDER_GAIN)
        _, found = _best_with(task, tier, chosen, limit_s, fits)
        limit_s = found.seconds if found is not None else limit_s
        found = _searched(task, tier, chosen, limit_s, fits) or found
        if found is None:
            break
        best = found
    return best


def _sited(
    reduced: Problem, route: Route, staged: Schedule | None, best_s: float
) -> SitedSchedule | None:
    """Return the schedule of the weights that are not sent with the ops that are, if it beats ``best_s``."""
    if staged is None:
        return None
    steps = route.moves.merged(emit(reduced, staged), len(route.op_sites))
    seconds = _seconds(reduced, route, steps)
    if seconds >= best_s:
        return None
    return SitedSchedule(
        task=reduced, schedule=staged, op_sites=route.op_sites, steps=steps, seconds=seconds
    )


def _seconds(task: Problem, route: Route, steps: Sequence[Step]) -> float:
    where = op_sites(task.workload.ops, route.op_sites, task.machine)
    return steady_seconds(
        compile_events(steps, route.op_times_s, task.machine, repeats=task.repeats, sites=where)
    )


def _reduced(
    task: Problem,
    tier: str,
    sent: frozenset[int],
    route: Route,
) -> Problem | None:
    """Return the problem of moving the other weights while the sent ones rest."""
    room = dict(task.room_bytes)
    room[tier] -= sum(task.weights[i].size_bytes for i in sent) + visiting_bytes(task, tier, route)
    if room[tier] < 0:
        return None
    times_s = own_times(task, route)
    return replace(
        task,
        weights=tuple(weight for i, weight in enumerate(task.weights) if i not in sent),
        idle_homes={**task.idle_homes, **{task.weights[i].name: tier for i in sent}},
        room_bytes=room,
        op_times_s=tuple(times_s),
        sums_s=tuple(running_sums(times_s)),
    )
