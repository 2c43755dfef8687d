"""Interval reservations: the moves of chosen intervals, each issued when its reserved time on a link comes.

Links that share a pipe hold each other up in the order of issue: a transfer that is issued long before its
link is free keeps the other links from the pipe until then. So a copy is issued at the last boundary
before its link is free, and a copy back not before the time reserved for it: as late as its use and the
copies due after it on the same link allow, less a lead. Until then its memory is someone else's.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gascompile.passes.intervals.decisions import (
    IN_ORDER,
    Decisions,
    MoveList,
    Order,
    base_memory,
)
from gascompile.passes.intervals.schedule import Scheduler
from gascompile.passes.model.interval_layout import RunLayout


def interval_reservations(
    plan: RunLayout,
    chosen: Decisions,
    before: MoveList | None = None,
    *,
    lead_s: float,
    order: Order = IN_ORDER,
) -> MoveList | None:
    """Return the schedule of ``chosen``; ``None`` if its intervals leave too much behind.

    Args:
        before: an earlier schedule of nearly the same decisions, whose times say when things are through.
        lead_s: how long before its reserved time a copy back may start.
        order: of moves that could stand either way.
    """
    memory = base_memory(plan, chosen)
    if plan.num_runs and int(memory.max()) > plan.task.limit_bytes:
        return None
    return _Reserving(plan, chosen, memory, before, lead_s, order).run()


def latest_starts(
    plan: RunLayout, chosen: Decisions, run_starts: Sequence[float]
) -> Mapping[int, float]:
    """Return when each copy back has to start, those that are due after it on its link included.

    Where the list repeats, the copies of the next iteration count too.

    Args:
        run_starts: when each run starts, and as one entry more when the last one ends.
    """
    latest: dict[int, float] = {}
    due_on: list[list[tuple[float, int]]] = [[] for _ in plan.task.routes]
    for number, route in enumerate(chosen.route):
        interval = plan.intervals[number]
        if route is not None and not interval.unused:
            due_on[route].append((run_starts[interval.end], number))
    for route, copies in enumerate(due_on):
        copies.sort(reverse=True)
        free = math.inf
        for ahead_s in (run_starts[-1], 0.0) if plan.task.workload.repeats else (0.0,):
            for due_s, number in copies:
                tensor = plan.intervals[number].tensor
                free = min(free, due_s + ahead_s) - plan.task.load_s(tensor, route)
                latest[number] = free
    return latest


class _Reserving(Scheduler):
    """The walk over the runs, with copies that are ready but not yet issued."""

    def __init__(
        self,
        plan: RunLayout,
        chosen: Decisions,
        memory: npt.NDArray[np.int64],
        before: MoveList | None,
        lead_s: float,
        order: Order,
    ) -> None:
        super().__init__(plan, chosen, memory, before, order)
        self.lead_s = lead_s
        self.link_in = [route.link_in for route in plan.task.routes]
        self.ready: list[list[int]] = [[] for _ in plan.task.routes]
        """Per route the copies out that wait for their link."""
        self.issued: set[int] = set()
        self.begun: set[int] = set()
        self.copied = {
            interval.version
            for number, interval in enumerate(plan.intervals)
            if chosen.route[number] is not None and number not in chosen.stored
        }
        """Values of which another interval uses the copy that the first one made."""
        self.reserved = latest_starts(plan, chosen, self.starts)

    def _store(self, number: int, boundary: int) -> None:
        """Let the copy out wait for its link."""
        del boundary
        route = self.chosen.route[number]
        assert route is not None, "only what leaves is written out"
        self.ready[route].append(number)
        self.num_ready += 1

    def _land_before(self, number: int, boundary: int) -> None:
        """Nothing: ``_arrive`` lets stay what has not left by then."""

    def _hold(self, run: int) -> None:
        """Count what has not left yet into the memory of ``run``."""
        lag_end = self.lag_end
        waiting = [number for _, number in self.flights if lag_end[number] <= run]
        if self.num_ready:
            waiting += [
                j
                for queue in self.ready
                for j in queue
                if j in self.begun and j not in self.ahead and lag_end[j] <= run
            ]
        for number in waiting:
            if number not in self.idle:
                self._set_lag(number, run + 1)

    def _issue(self, boundary: int) -> None:
        """Issue the copies out whose link is free before the next boundary."""
        until_s = self._next_s(boundary)
        while (free := self._first_free()) is not None and free[0] <= until_s:
            self._issue_first(free[1], boundary)

    def _issue_next(self, boundary: int) -> bool:
        """Issue the copy out whose link is free first; return whether there is one."""
        free = self._first_free()
        if free is None:
            return False
        self._issue_first(free[1], boundary)
        return True

    def _first_free(self) -> tuple[float, int] | None:
        """Return when the first link with something to carry out is free, and its route."""
        first: tuple[float, int] | None = None
        for route, queue in enumerate(self.ready):
            if queue and (link := self.task.routes[route].link_out) is not None:
                free_s = self.links.link_free[link]
                if first is None or free_s < first[0]:
                    first = free_s, route
        return first

    def _next_s(self, boundary: int) -> float:
        return self.now + self.run_s[boundary] if boundary < self.count else math.inf

    def _issue_first(self, route: int, boundary: int) -> None:
        number = self.ready[route].pop(0)
        self.num_ready -= 1
        super()._store(number, boundary)
        self.issued.add(number)
        if number in self.begun and number not in self.ahead:
            expected_s = self.arrival[number] - self.now + self.starts[boundary]
            through = bisect_left(self.starts, expected_s, boundary, self.count)
            self._set_lag(number, through)
            heapq.heappush(self.flights, (self.arrival[number], number))

    def _begin(self, number: int, boundary: int) -> None:
        """Let the tensor go, unless its copy waits for the link still."""
        self.begun.add(number)
        at_hand = number in self.issued or number in self.ahead
        if at_hand or number not in self.chosen.stored:
            super()._begin(number, boundary)

    def _arrive(self, number: int, boundary: int) -> None:
        """Wait for what the next run needs; what has not left by then stays."""
        interval = self.plan.intervals[number]
        late = number in self.chosen.stored and number not in self.issued
        if late and number not in self.ahead and not interval.wraps:
            route = self.chosen.route[number]
            assert route is not None, "only what leaves is written out"
            self.ready[route].remove(number)
            self.num_ready -= 1
            if interval.version not in self.copied:
                self.idle.add(number)
                return
            super()._store(number, boundary)
            self.issued.add(number)
        super()._arrive(number, boundary)

    def _load(self, boundary: int) -> None:
        """Start the copies back whose time has come and whose link is free before the next boundary."""
        next_s = self._next_s(boundary)
        run_s = next_s - self.now if next_s < math.inf else 0.0
        latest_s = self.starts[boundary] + run_s + self.lead_s
        while heads := self._heads(boundary, next_s, latest_s):
            heads.sort()
            if not any(self._fetch(route, boundary) for _, route in heads):
                return

    def _heads(self, boundary: int, next_s: float, latest_s: float) -> list[tuple[float, int]]:
        """Return ``(reserved start, route)`` of each route whose first copy back is due or may start by now.

        Args:
            boundary: where the copies would start.
            next_s: when the next one is reached; their link has to be free before.
            latest_s: until when the time reserved for them has to come.
        """
        heads: list[tuple[float, int]] = []
        for route, queue in enumerate(self.queues):
            if not queue:
                continue
            due, number = queue[0]
            if due > boundary and self.links.link_free[self.link_in[route]] > next_s:
                continue
            reserved_s = self._reserved_s(due, abs(number))
            if due <= boundary or reserved_s <= latest_s:
                heads.append((reserved_s, route))
        return heads

    def _reserved_s(self, due: int, number: int) -> float:
        """Return the latest start of a copy back; one that crosses the end serves the next iteration."""
        reserved_s = self.reserved[number]
        crosses = due >= self.count and self.plan.intervals[number].wraps
        return reserved_s + self.starts[-1] if crosses else reserved_s

    def _close(self) -> None:
        """End the list: what still leaves may cross the end."""
        self._issue(self.count)
        super()._close()
