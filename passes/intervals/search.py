"""Interval search: the best schedule among candidates, and changes to it that the replay asks for.

A candidate is a layout with a selection of intervals. What its schedule shows to be for nothing is taken
back; then stalls point at intervals that had better stay, take another route or be recomputed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.cost_models.simulate.events import steady_iteration
from gascompile.passes.intervals.decisions import Schedule, choices
from gascompile.passes.intervals.events import event_program
from gascompile.passes.intervals.reservations import interval_reservations
from gascompile.passes.intervals.schedule import schedule
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.model.interval_layout import Key, Layout, layout
from gascompile.passes.model.interval_problem import IntervalProblem

_ROUNDS = 3
"""How often a schedule is made again with what the one before it showed."""


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule and what it takes."""

    strategy: str
    seconds: float
    schedule: Schedule
    selection: Selection
    recomputed: frozenset[tuple[int, int]]
    stalls: tuple[tuple[int, float], ...]
    """``(interval, seconds)`` that its waits blocked."""
    lead_s: float | None = None
    """How long before its reserved time a copy back may start; ``None`` where nothing is reserved."""


class Search:
    """The best schedule so far, and the clock."""

    def __init__(self, task: IntervalProblem, *, time_limit_s: float, mip_gap: float) -> None:
        self.task = task
        self.base = layout(task)
        self.begun_s = time.perf_counter()
        self.deadline_s = self.begun_s + time_limit_s
        self.mip_gap = mip_gap
        self.bound_s = 0.0
        self.best: Found | None = None
        self._tried: set[int] = set()

    @property
    def out_of_time(self) -> bool:
        """Whether the clock has run out."""
        return time.perf_counter() >= self.deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the clock runs out."""
        return max(0.0, self.deadline_s - time.perf_counter())

    @property
    def done(self) -> bool:
        """Whether nothing can be faster, but for a hundredth of the asked gap."""
        return self.best is not None and self.best.seconds <= self.bound_s * (
            1 + self.mip_gap / 100
        )

    @property
    def finished(self) -> bool:
        """Whether the search may end: a tenth of the gap, or the gap and a third of the time, is reached."""
        best = self.best
        if best is None:
            return False
        spent = time.perf_counter() - self.begun_s >= (self.deadline_s - self.begun_s) / 3
        near = best.seconds - self.bound_s <= self.mip_gap / 10 * best.seconds
        return self.out_of_time or near or (spent and self.within_gap)

    @property
    def within_gap(self) -> bool:
        """Whether the best schedule is within the asked gap of the bound."""
        best = self.best
        return best is not None and best.seconds - self.bound_s <= self.mip_gap * best.seconds

    def consider(
        self,
        strategy: str,
        selection: Selection,
        recomputed: frozenset[tuple[int, int]] = frozenset(),
        *,
        lead_s: float | None = None,
        rounds: int = _ROUNDS,
    ) -> Found | None:
        """Schedule ``selection``; return the best of a few rounds, ``None`` where it does not fit.

        Args:
            strategy: the name that the schedule carries.
            selection: the intervals that leave.
            recomputed: what its layout recomputes.
            lead_s: makes moves when their time has come, copies back by so much earlier; else at once.
            rounds: how often the schedule is made, each time with what the one before it showed.
        """
        best: Found | None = None
        before: Schedule | None = None
        for _ in range(rounds):
            found = self._once(strategy, selection, recomputed, before, lead_s)
            if found is None:
                break
            if best is None or found.seconds < best.seconds:
                best = found
            before = found.schedule
            if found.seconds <= self.bound_s * (1 + 1e-9) or self.out_of_time:
                break
            selection = _without_idle(found)
        if best is not None and (self.best is None or best.seconds < self.best.seconds):
            self.best = best
        return best

    def try_once(self, like: Found, selection: Selection) -> None:
        """Consider a change to a schedule, unless the same has been tried: of few tensors most have."""
        routes = frozenset(selection.routes.items())
        known = hash((like.recomputed, like.lead_s, routes))
        if known not in self._tried:
            self._tried.add(known)
            self.consider(like.strategy, selection, like.recomputed, lead_s=like.lead_s)

    def _once(
        self,
        strategy: str,
        selection: Selection,
        recomputed: frozenset[tuple[int, int]],
        before: Schedule | None,
        lead_s: float | None,
    ) -> Found | None:
        if not selection.fits:
            return None
        plan = selection.plan
        chosen = choices(plan, selection.routes)
        if lead_s is None:
            made = schedule(plan, chosen, before)
        else:
            made = interval_reservations(plan, chosen, before, lead_s=lead_s)
        if made is None:
            return None
        program, waits = event_program(made)
        seconds, stalls = steady_iteration(program)
        blocked = tuple((waits[i], time_s) for i, time_s in stalls)
        seconds = self.task.iteration_s(
            seconds, ops_s=float(plan.clock[-1]), moved_bytes=made.moved_bytes
        )
        return Found(strategy, seconds, made, selection, recomputed, blocked, lead_s)


def _without_idle(found: Found) -> Selection:
    """Return the selection without the intervals whose tensor never got away."""
    if not found.schedule.idle:
        return found.selection
    selection = found.selection.copy()
    for j in found.schedule.idle:
        selection.drop(j)
    return selection


def selection_of(
    plan: Layout, leave: Mapping[Key, tuple[float, ...]], *, threshold: float = 0.5
) -> Selection:
    """Return whole intervals from shares: what mostly leaves, more where memory is short, less where not."""
    found = Selection(plan)
    found.settle()
    shares = {
        j: leave[key] for j, key in enumerate(plan.keys) if key in leave and sum(leave[key]) > 0
    }
    order = sorted(shares, key=lambda j: -sum(shares[j]))
    owed = [0.0] * len(plan.task.routes)
    for j in sorted(shares, key=lambda j: plan.intervals[j].start):
        if sum(shares[j]) >= threshold:
            found.add(j, _route(shares[j], plan.task.sizes[plan.intervals[j].tensor], owed))
    rest = sorted(
        (j for j in range(len(plan.intervals)) if j not in found.routes),
        key=lambda j: (-sum(shares.get(j, (0.0,))), -_idle_s(plan, j)),
    )
    found.fill((j, None) for j in rest)
    found.thin(j for j in reversed(order) if sum(shares[j]) < threshold)
    return found


def _route(share: tuple[float, ...], size: int, owed: list[float]) -> int:
    """Return the route that is owed most, so that split intervals add up to the shares."""
    total = sum(share)
    for route, part in enumerate(share):
        owed[route] += size * part / total
    best = max((r for r, part in enumerate(share) if part > 0), key=lambda r: owed[r])
    owed[best] -= size
    return best


def _idle_s(plan: Layout, j: int) -> float:
    return sum(float(plan.clock[b] - plan.clock[a]) for a, b in plan.spans(plan.intervals[j]))


def improve(search: Search, until_s: float, chance: random.Random) -> None:
    """Change the best schedule where it stalls, as long as that helps and the clock allows."""
    fruitless = 0
    while time.perf_counter() < until_s and not search.finished and fruitless < 60:
        best = search.best
        if best is None:
            return
        selection = _changed(best, chance)
        before = best.seconds
        if selection is not None:
            search.try_once(best, selection)
        now = search.best
        fruitless = 0 if now is not None and now.seconds < before else fruitless + 1


def _changed(found: Found, chance: random.Random) -> Selection | None:
    """Return the selection with one thing changed at a place where the schedule stalls."""
    if not found.stalls:
        return None
    selection = found.selection.copy()
    plan = selection.plan
    stalls = sorted(found.stalls, key=lambda stall: -stall[1])[:40]
    j, _ = chance.choices(stalls, weights=[time_s for _, time_s in stalls])[0]
    at = plan.intervals[j].end
    routes = plan.task.routes
    near = [
        k
        for k in selection.routes
        if plan.intervals[k].start >= 0 and abs(plan.intervals[k].end - at) < plan.num_runs // 8
    ]
    what = chance.randrange(3)
    picked = [j, *chance.sample(near, min(len(near), chance.choice((0, 1, 2, 4))))]
    for k in picked:
        if k not in selection.routes:
            continue
        route = selection.routes[k]
        if not selection.take_back(k):
            continue
        if what == 0 and len(routes) > 1:
            selection.add(k, chance.choice([r for r in range(len(routes)) if r != route]))
    if not selection.fits:
        rest = [
            k for k in range(len(plan.intervals)) if k not in selection.routes and k not in picked
        ]
        chance.shuffle(rest)
        rest.sort(key=lambda k: -_idle_s(plan, k) * chance.uniform(0.7, 1.3))
        selection.fill((k, None) for k in rest)
        selection.fill((k, None) for k in picked)
    return selection
