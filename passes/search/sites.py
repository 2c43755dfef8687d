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
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.plan.emit import emit
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import (
    best_staging,
    least_arena_bytes,
    search,
    time_bound_s,
)
from gascompile.passes.search.site_choices import (
    able_weights,
    candidates,
    certain_s,
    improved,
    least_done_s,
)
from gascompile.passes.search.site_order import reordered, site_order
from gascompile.passes.search.site_routes import (
    SiteRoute,
    find_route,
    own_times,
    site_peak_bytes,
)
from gascompile.passes.search.strategies import MANY_WEIGHTS, family, placements_of, strategies

Planner = Callable[[Problem], Schedule | None]

_FILL = (1.0, 0.95, 0.85)
"""Shares of the arena that residents may take."""
_FAMILIES = ("first_fit", "per_layer", "largest_first")
_SEARCHED = 2
"""Choices of ops whose other weights are planned as thoroughly as where nothing is sent."""
_SEARCHED_WORK = 20_000
"""Visits that are placed for each of these. [Empirical] For 201 weights of a Llama of 1.1B a search ends after 2,000;
with tiles of them it went on for ten seconds, and found nothing better."""
_REORDERED = 2
"""Times that the ops of a choice are put in the order in which sites are done with them."""
_ORDER_GAIN = 1e-3
"""Of the time, that another order of the ops has to save."""
_NEAR = 7
"""Next ops with weights of which one is tried at the other site together with the one at hand."""
_HOPEFUL = 1.1
"""A choice that takes longer than the best schedule by more is not improved."""


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
    for tier in other_tiers(task):
        tried: list[tuple[float, tuple[int, ...]]] = []
        seen: set[frozenset[int]] = set()
        for sent in candidates(task, tier):
            if sent and sent not in seen:
                seen.add(sent)
                limit_s = best.seconds if best else best_s
                least_s, better = best_with(task, tier, sent, limit_s, fits)
                best = better or best
                tried.append((least_s, tuple(sorted(sent))))
        for least_s, chosen in sorted(tried)[:_SEARCHED]:
            limit_s = best.seconds if best else best_s
            if least_s < limit_s:
                best = searched(task, tier, frozenset(chosen), limit_s, fits) or best
        limit_s = best.seconds if best else best_s
        best = (
            _in_time(task, tier, [frozenset(chosen) for _, chosen in tried], limit_s, fits) or best
        )
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


def other_tiers(task: Problem) -> list[str]:
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
            for placement in placements_of(task, largest.residents, "sites")[:1]:
                if placement.link_of not in seen:
                    seen.add(placement.link_of)
                    yield placement


def best_with(
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
    if reduced is None or (least_s := certain_s(task, tier, sent)) >= best_s:
        return math.inf, None
    best: SitedSchedule | None = None
    for placement in _placements(reduced):
        limit_s = best.seconds if best else best_s
        if time_bound_s(reduced, placement) >= limit_s:
            continue
        if least_arena_bytes(reduced, placement)[0] > reduced.arena_limit_bytes:
            continue
        staged = best_staging(reduced, placement, reduced.arena_limit_bytes)
        candidate = _sited(reduced, route, staged, limit_s)
        if candidate is not None and fits(candidate):
            best = candidate
    return least_s, best


def searched(
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
    candidate = _sited(reduced, route, staged, best_s)
    return candidate if candidate is not None and fits(candidate) else None


def _in_time(
    task: Problem,
    tier: str,
    tried: Sequence[frozenset[int]],
    best_s: float,
    fits: Callable[[SitedSchedule], bool],
) -> SitedSchedule | None:
    """Return the best schedule with ops in the order in which sites are done with them, if it beats ``best_s``.

    Args:
        task: the problem with all ops on the tier that computes.
        tier: the other site.
        tried: weights that stay there, as choices to begin with.
        best_s: seconds to beat clearly.
        fits: whether the account of a schedule keeps the budget.
    """
    best: SitedSchedule | None = None
    done_s = {sent: least_done_s(task, tier, sent) for sent in tried}
    first = min(done_s, key=lambda sent: (done_s[sent], sorted(sent)), default=frozenset[int]())
    able = able_weights(task, tier)
    if first and len(able) < MANY_WEIGHTS and done_s[first] < _HOPEFUL * best_s:
        better = improved(task, tier, first, able, least_done_s, _NEAR)
        done_s[better] = least_done_s(task, tier, better)
    for sent in sorted(done_s, key=lambda sent: (done_s[sent], sorted(sent)))[:_SEARCHED]:
        names = frozenset(task.weights[i].name for i in sent)
        sites, again = find_route(task, tier, names).op_sites, task
        for _ in range(_REORDERED):
            limit_s = best.seconds if best else best_s * (1 - _ORDER_GAIN)
            if done_s[sent] >= limit_s:
                break
            again = reordered(again, site_order(again.workload, sites, task.machine))
            chosen = frozenset(i for i, w in enumerate(again.weights) if w.name in names)
            _, candidate = best_with(again, tier, chosen, limit_s, fits)
            limit_s = candidate.seconds if candidate else limit_s
            candidate = searched(again, tier, chosen, limit_s, fits) or candidate
            if candidate is None:
                break
            best, sites = candidate, candidate.op_sites
    return best


def _sited(
    reduced: Problem, route: SiteRoute, staged: Schedule | None, best_s: float
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


def _seconds(task: Problem, route: SiteRoute, steps: Sequence[Step]) -> float:
    where = op_sites(task.workload.ops, route.op_sites, task.machine)
    return steady_seconds(
        compile_events(steps, route.op_times_s, task.machine, repeats=task.repeats, sites=where)
    )


def _reduced(
    task: Problem,
    tier: str,
    sent: frozenset[int],
    route: SiteRoute,
) -> Problem | None:
    """Return the problem of moving the other weights while the sent ones rest."""
    room = dict(task.room_bytes)
    room[tier] -= sum(task.weights[i].size_bytes for i in sent) + site_peak_bytes(task, tier, route)
    if room[tier] < 0:
        return None
    times_s = own_times(task, route)
    return replace(
        task,
        weights=tuple(weight for i, weight in enumerate(task.weights) if i not in sent),
        unread_homes={**task.unread_homes, **{task.weights[i].name: tier for i in sent}},
        room_bytes=room,
        op_times_s=tuple(times_s),
        sums_s=tuple(running_sums(times_s)),
    )
