"""Interval search: the best schedule among candidates, and changes to it that the replay asks for.

A candidate is a layout with a selection of intervals. What its schedule shows to be for nothing is taken
back; then stalls point at intervals that had better stay, take another route or be recomputed.
What ends a search is its work, counted in runs and moves that were placed, and in proportion to what may be
gained: a machine that is busy finds the same plan, only later. The clock is there for who set it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.cost_models.simulate.events import steady_iteration
from gascompile.passes.bounds.interval_program import Relaxation
from gascompile.passes.intervals.decisions import IN_ORDER, Kind, MoveList, Order, decisions
from gascompile.passes.intervals.events import event_program
from gascompile.passes.intervals.reservations import interval_reservations
from gascompile.passes.intervals.schedule import schedule
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_layout import Key, RunLayout, layout
from gascompile.passes.model.interval_problem import IntervalProblem

_ROUNDS = 3
"""How often a schedule is made again with what the one before it showed."""
_WORK_PER_S = 60_000
"""Runs and moves that are taken to be placed in a second.

[Empirical] 120,000 to 170,000 were on one core of a Xeon beside other work, so that half that speed is enough.
"""
_ITERATIONS = 75
"""Iterations whose gain a search may take, as time: what is trained or served runs for far more."""
_LEAST = 105_000
"""Work that a search may do however little there is to gain.

[Empirical] 135,000, and 90 iterations, found plans 0.2 % faster in a fifth more time, over 35 steps of 4 to 60 layers.
"""
_LONGER, _LONGEST = 1.4, 400_000
"""It goes on until so many times the work is done after which it got better the last time, and no longer than this."""
_VAIN, _VAIN_LEAST = 4.0, 40_000
"""A search of many tensors is in vain after so many times the moves after which it got better the last time.

Not before so many. [Empirical] From gain to gain they grew at most threefold, in a trace of G10 and in 200 layers.
"""
_BETTER = 2e-3
"""What counts as better: a share of the seconds."""
_MUCH_BETTER = 5e-3
"""What a search of what gains little in its iterations goes on for.

[Empirical] 30 layers of 256 at 12 MiB: a last 0.3 % took half as long again as all before it.
"""
_HOPEFUL = 1.02
"""A schedule that takes longer than the best one by more is not made again.

[Empirical] of 760 that were slower at first, over training steps and published traces, no later round beat the best.
"""
FEW_TENSORS = 64
"""Workloads of no more are searched with all their freedom."""
PER_SCHEDULE = 50
"""Work of any schedule beside its runs and moves."""
_MOSTLY = 0.5  # share of a relaxed solution from which on an interval leaves whole
_PIVOT = 10
"""Work of an iteration of the solver; [empirical] 90 to 150 us in programs of 4,000 to 17,000 rows."""


@dataclass(frozen=True, slots=True)
class ScheduledSelection:
    """Intervals that leave, with their schedule and its seconds."""

    strategy: str
    seconds: float
    schedule: MoveList
    selection: Selection
    stalls: tuple[tuple[int, float], ...]
    """``(interval, seconds)`` that its waits blocked."""
    lead_s: float | None = None
    """How long before its reserved time a copy back may start; ``None`` where nothing is reserved."""
    order: Order = IN_ORDER


class Search:
    """The best schedule so far, and the work that it took."""

    def __init__(self, task: IntervalProblem, effort: Effort) -> None:
        """Begin to schedule ``task``; as much work may be done as fits into all the seconds of ``effort``."""
        self.task = task
        self.base = layout(task)
        self.deadline_s = time.perf_counter() + max(effort.left_s(), effort.time_limit_s / 10)
        self.mip_gap = effort.mip_gap
        self.bound_s = 0.0
        self.best: ScheduledSelection | None = None
        self.best_of: dict[str, ScheduledSelection] = {}
        self.work = 0.0
        self._better_at = 0.0
        self._solved = 0.0
        self._placed_at = 0.0
        self._most = effort.time_limit_s * _WORK_PER_S
        self._tried: set[int] = set()

    @property
    def out_of_time(self) -> bool:
        """Whether the clock, or the work that was granted in its place, has run out."""
        return self.work >= self._most or time.perf_counter() >= self.deadline_s

    @property
    def left_s(self) -> float:
        """Wall seconds until the clock runs out."""
        return max(0.0, self.deadline_s - time.perf_counter())

    @property
    def left(self) -> float:
        """Work that is still worth doing: of what may be gained in some iterations, and never beyond the limit."""
        best = self.best
        gain_s = best.seconds - self.bound_s if best is not None else math.inf
        longer = min(self._better_at * _LONGER, _LONGEST)
        worth = max(_LEAST, longer, gain_s * _ITERATIONS * _WORK_PER_S)
        return max(0.0, min(self._most, worth) - self.work)

    @property
    def pivots_left(self) -> int:
        """Iterations of the solver that come to a third of the work left."""
        return int(self.left / 3 / _PIVOT)

    def relaxed(self, relaxation: Relaxation) -> Relaxation:
        """Count the work of a solution of the interval program."""
        self.work += relaxation.pivots * _PIVOT
        self._solved += relaxation.pivots * _PIVOT
        return relaxation

    @property
    def done(self) -> bool:
        """Whether nothing can be faster, but for a hundredth of the asked gap."""
        return self.best is not None and self.best.seconds <= self.bound_s * (
            1 + self.mip_gap / 100
        )

    @property
    def finished(self) -> bool:
        """Whether the search may end: its work is done, or most within the gap, or a tenth of the gap is left."""
        best = self.best
        if best is None:
            return False
        left = self.left
        near = best.seconds - self.bound_s <= self.mip_gap / 10 * best.seconds
        enough = self.work >= 3 * left and self.within_gap
        return near or enough or self._vain or left <= 0 or self.out_of_time

    @property
    def _vain(self) -> bool:
        """Whether many moves were placed since it got better the last time; what the solver does counts for neither."""
        many = len(self.task.names) > FEW_TENSORS
        return many and self.work - self._solved >= max(_VAIN_LEAST, _VAIN * self._placed_at)

    @property
    def within_gap(self) -> bool:
        """Whether the best schedule is within the asked gap of the bound."""
        best = self.best
        return best is not None and best.seconds - self.bound_s <= self.mip_gap * best.seconds

    def over(self, begun: float, share: float) -> bool:
        """Whether what began at some work has had its share of what was left, as far as that is known by now."""
        done = self.work - begun
        return self.finished or done >= share * (done + self.left)

    def leaders(self) -> list[ScheduledSelection]:
        """Return the best schedules of the two strategies that are ahead, the faster first."""
        return sorted(self.best_of.values(), key=lambda best: best.seconds)[:2]

    def consider(
        self,
        strategy: str,
        selection: Selection,
        *,
        lead_s: float | None = None,
        order: Order = IN_ORDER,
        rounds: int = _ROUNDS,
    ) -> ScheduledSelection | None:
        """Schedule ``selection``; return the best of a few rounds, ``None`` where it does not fit.

        Args:
            strategy: the name that the schedule carries.
            selection: the intervals that leave.
            lead_s: makes moves when their time has come, copies back by so much earlier; else at once.
            order: of moves that could stand either way.
            rounds: how often the schedule is made, each time with what the one before it showed.
        """
        best: ScheduledSelection | None = None
        before: MoveList | None = None
        for _ in range(rounds):
            candidate = self._once(strategy, selection, before, lead_s, order)
            if candidate is None:
                break
            if (best is None or candidate.seconds < best.seconds) and not _leaves_copies(candidate):
                best = candidate
            before = candidate.schedule
            hopeless = self.best is not None and candidate.seconds > _HOPEFUL * self.best.seconds
            if hopeless or candidate.seconds <= self.bound_s * (1 + 1e-9) or self.out_of_time:
                break
            selection = _without_idle(candidate)
        if best is not None:
            known_s = self.best.seconds if self.best is not None else math.inf
            if best.seconds < known_s * (1 - _BETTER):
                self._placed_at = self.work - self._solved
            if best.seconds < known_s * (1 - _MUCH_BETTER):
                self._better_at = self.work
            if self.best is None or best.seconds < self.best.seconds:
                self.best = best
            same = self.best_of.get(strategy)
            if same is None or best.seconds < same.seconds:
                self.best_of[strategy] = best
        return best

    def try_once(
        self,
        strategy: str,
        selection: Selection,
        lead_s: float | None = None,
        order: Order = IN_ORDER,
    ) -> ScheduledSelection | None:
        """Consider ``selection``, unless the same has been tried: of few tensors most have."""
        self.work += PER_SCHEDULE
        known = hash((selection.plan.runs, lead_s, order, frozenset(selection.routes.items())))
        if known in self._tried:
            return None
        self._tried.add(known)
        return self.consider(strategy, selection, lead_s=lead_s, order=order)

    def _once(
        self,
        strategy: str,
        selection: Selection,
        before: MoveList | None,
        lead_s: float | None,
        order: Order,
    ) -> ScheduledSelection | None:
        if not selection.fits:
            return None
        plan = selection.plan
        chosen = decisions(plan, selection.routes)
        if lead_s is None:
            made = schedule(plan, chosen, before, order)
        else:
            made = interval_reservations(plan, chosen, before, lead_s=lead_s, order=order)
        self.work += PER_SCHEDULE + plan.num_runs
        if made is None:
            return None
        self.work += made.num_moves
        program, waits = event_program(made)
        seconds, stalls = steady_iteration(program)
        blocked = tuple((waits[i], time_s) for i, time_s in stalls)
        seconds = self.task.iteration_s(
            seconds, ops_s=float(plan.clock[-1]), moved_bytes=made.moved_bytes
        )
        return ScheduledSelection(strategy, seconds, made, selection, blocked, lead_s, order)


def _leaves_copies(candidate: ScheduledSelection) -> bool:
    """Whether what lasts was written out for nothing: an iteration ends with a copy that it does not begin with."""
    plan, task = candidate.schedule.layout, candidate.schedule.layout.task
    stored = {
        number
        for moves in candidate.schedule.boundaries
        for kind, number in moves
        if kind == Kind.STORED and task.persistent[plan.intervals[number].tensor]
    }
    if not stored or not task.workload.repeats:
        return False
    used = {plan.intervals[j].version for j in candidate.selection.routes if j not in stored}
    return any(plan.intervals[j].version not in used for j in stored)


def _without_idle(candidate: ScheduledSelection) -> Selection:
    """Return the selection without the intervals whose tensor never got away."""
    if not candidate.schedule.idle:
        return candidate.selection
    selection = candidate.selection.copy()
    for j in candidate.schedule.idle:
        selection.drop(j)
    return selection


def selection_of(plan: RunLayout, leave: Mapping[Key, tuple[float, ...]]) -> Selection:
    """Return whole intervals from shares: what mostly leaves, more where memory is short, less where not."""
    selection = Selection(plan)
    selection.evict_unused()
    shares = {
        j: leave[key] for j, key in enumerate(plan.keys) if key in leave and sum(leave[key]) > 0
    }
    order = sorted(shares, key=lambda j: -sum(shares[j]))
    owed = [0.0] * len(plan.task.routes)
    for j in sorted(shares, key=lambda j: plan.intervals[j].start):
        if sum(shares[j]) >= _MOSTLY:
            selection.add(j, _route(shares[j], plan.task.sizes[plan.intervals[j].tensor], owed))
    rest = sorted(
        (j for j in range(len(plan.intervals)) if j not in selection.routes),
        key=lambda j: (-sum(shares.get(j, (0.0,))), -plan.idle_s[j]),
    )
    selection.fill((j, None) for j in rest)
    selection.thin(j for j in reversed(order) if sum(shares[j]) < _MOSTLY)
    return selection


def _route(share: tuple[float, ...], size: int, owed: list[float]) -> int:
    """Return the route that is owed most, so that split intervals add up to the shares."""
    total = sum(share)
    for route, part in enumerate(share):
        owed[route] += size * part / total
    best = max((r for r, part in enumerate(share) if part > 0), key=lambda r: owed[r])
    owed[best] -= size
    return best
