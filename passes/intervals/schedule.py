"""Interval schedule: from decisions per interval to moves at run boundaries.

Bytes leave as soon as their interval begins. They are waited for and released at the boundary where they
are through, or earlier where a run needs the room. They come back as early as the planned memory of all
runs up to their use allows, earliest use first on each link. Memory is a sum over the list of moves alone,
so the budget holds whatever the real times are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from gascompile.cost_models.simulate.clock import Clock
from gascompile.passes.intervals.boundary import beside, most_between
from gascompile.passes.intervals.decisions import (
    IN_ORDER,
    Decisions,
    Kind,
    Move,
    MoveList,
    Order,
    base_memory,
)
from gascompile.passes.intervals.departures import departures
from gascompile.passes.model.interval_layout import RunLayout
from gascompile.passes.model.interval_problem import IntervalProblem


def schedule(
    plan: RunLayout,
    chosen: Decisions,
    before: MoveList | None = None,
    order: Order = IN_ORDER,
) -> MoveList | None:
    """Return the schedule of ``chosen``; ``None`` if its intervals leave too much behind.

    Args:
        before: an earlier schedule of nearly the same decisions, whose times say when things are through.
        order: of moves that could stand either way.
    """
    memory = base_memory(plan, chosen)
    if plan.num_runs and int(memory.max()) > plan.task.limit_bytes:
        return None
    return Scheduler(plan, chosen, memory, before, order).run()


class Scheduler:
    """One walk over the runs with a clock, the links and the memory of all runs."""

    def __init__(
        self,
        plan: RunLayout,
        chosen: Decisions,
        memory: npt.NDArray[np.int64],
        before: MoveList | None,
        order: Order,
    ) -> None:
        self.plan = plan
        self.order = order
        self.task: IntervalProblem = plan.task
        self.chosen = chosen
        self.memory = memory
        self.sizes = plan.sizes
        self.limit = plan.task.limit_bytes
        self.count = plan.num_runs
        same = before is not None and before.layout is plan
        self.expected = before.clock if before is not None and same else plan.clock
        self.starts: list[float] = self.expected.tolist()
        self.run_s: list[float] = plan.seconds.tolist()
        self.clock = np.zeros(self.count + 1)
        self.now = 0.0
        machine = plan.task.machine
        self.links = Clock.of(len(machine.links), len(machine.pipes))
        self.boundaries: list[list[Move]] = [[] for _ in range(self.count + 1)]
        self.arrival: dict[int, float] = {}
        self.lag_end: dict[int, int] = {}
        self.flights: list[tuple[float, int]] = []
        self.queues: list[list[tuple[int, int]]] = [[] for _ in plan.task.routes]
        self.released: dict[int, int] = {}
        self.loaded: dict[int, int] = {}
        self.tail_loads: set[int] = set()
        self.idle: set[int] = set()
        self.num_ready = 0  # copies out that wait for their link; here none does
        self.behind: list[int] = []
        self.crowded: dict[int, int] = {}
        """Per copy back that found no room the run that had none."""
        self.carried = before.carried if before is not None and same else {}
        leave = departures(plan, chosen, self.starts, order)
        self.store_at, self.begin_at, self.due_at = leave.store_at, leave.begin_at, leave.due_at
        self.ahead = leave.ahead
        self.arrival |= {j: self.carried.get(j, 0.0) for j in self.ahead}

    def run(self) -> MoveList | None:
        self._project_lags()
        self._open()
        for run in range(self.count):
            if not self._boundary(run):
                return None
            self.clock[run] = self.now
            self.now += self.run_s[run]
        self.clock[self.count] = self.now
        self._close()
        crossing = self.ahead | self.tail_loads
        carried = {j: max(0.0, self.arrival[j] - self.now) for j in crossing}
        gone = {
            j: (at, self.loaded.get(j, self.count))
            for j, at in self.released.items()
            if j not in self.idle
        }
        return MoveList(
            layout=self.plan,
            decisions=self.chosen,
            boundaries=self.boundaries,
            memory=self.memory,
            clock=self.clock,
            carried=carried,
            gone=gone,
            idle=self.idle,
            ahead=self.ahead,
        )

    def _project_lags(self) -> None:
        """Plan the memory of copies on their way out, as if runs started when expected."""
        free = dict.fromkeys(range(len(self.task.routes)), 0.0)
        for boundary, numbers in enumerate(self.store_at):
            for number in numbers:
                interval, route = self.plan.intervals[number], self.chosen.route[number]
                assert route is not None, "only what leaves is written out"
                if number in self.ahead:
                    continue
                start = max(free[route], self.starts[boundary])
                free[route] = start + self.task.store_s(interval.tensor, route)
                self._set_lag(number, bisect_left(self.starts, free[route], 0, self.count))

    def _set_lag(self, number: int, through: int) -> None:
        """Let the tensor of an interval stay until boundary ``through``, within the interval's first part."""
        interval = self.plan.intervals[number]
        begin = interval.start + 1
        through = min(max(through, begin), self.count if interval.wraps else interval.end)
        old = self.lag_end.get(number, begin)
        size = self.sizes[number]
        if through == old + 1:
            self.memory[old] += size  # mostly, and faster than a slice
        elif through > old:
            self.memory[old:through] += size
        elif through < old:
            self.memory[through:old] -= size
        self.lag_end[number] = through

    def _open(self) -> None:
        """Start the list: what wraps is away and comes back in order of use."""
        for number, route in enumerate(self.chosen.route):
            interval = self.plan.intervals[number]
            if route is None or not interval.wraps:
                continue
            size = self.sizes[number]
            held = self.memory[: interval.end]
            if number in self.carried and (not len(held) or int(held.max()) + size <= self.limit):
                held += size
                self.loaded[number] = 0
                self.arrival[number] = self.carried[number]
                self.boundaries[0].append((Kind.LOAD, number))
            else:
                self._queue(route, interval.end, number)

    def _boundary(self, run: int) -> bool:
        """Make all moves before ``run``; return whether it fits."""
        self._land(run)
        if self.order.loads_first:
            self._load_first(run)
        for number in self.store_at[run]:
            self._store(number, run)
        if self.num_ready:
            self._issue(run)
        for number in self.begin_at[run]:
            self._begin(number, run)
        self._hold(run)
        self._load(run)
        if self.order.loads_first:
            self._load_ahead(run)
        if self.memory.item(run) > self.limit:
            self._load_beside(run)
            while self.memory.item(run) > self.limit:
                if self.flights:
                    self.now = max(self.now, self.flights[0][0])
                    self._land(run)
                elif not self._issue_next(run):
                    return False
            self._issue(run)
            self._load(run)
        if self.due_at[run]:
            for number in self.due_at[run]:
                self._land_before(number, run)
                self._arrive(number, run)
            self._land(run)
            self._issue(run)
            self._load(run)
        return True

    def _issue(self, boundary: int) -> None:
        """Issue what waits for its link; here nothing does."""

    def _issue_next(self, boundary: int) -> bool:
        """Issue the first that waits for its link; return whether there is one."""
        del boundary
        return False

    def _hold(self, run: int) -> None:
        """Count what has not left yet into the memory of ``run``: runs before it were faster than expected."""
        for _, number in self.flights:
            if number not in self.idle and self.lag_end[number] <= run:
                self._set_lag(number, run + 1)

    def _store(self, number: int, boundary: int) -> None:
        route = self.chosen.route[number]
        assert route is not None, "only what leaves is written out"
        self.boundaries[boundary].append((Kind.STORE, number))
        self.arrival[number] = self._enqueue(number, route, out=True)

    def _begin(self, number: int, boundary: int) -> None:
        """Let the tensor go: at once if it has a copy, else when its copy is through."""
        if number not in self.chosen.stored:
            self.boundaries[boundary].append((Kind.DROP, number))
            self._leave(number, boundary)
        elif self.arrival[number] <= self.now:
            self.boundaries[boundary].append((Kind.RELEASE, number))
            self._set_lag(number, boundary)
            self._leave(number, boundary)
        else:
            expected_s = self.arrival[number] - self.now + self.starts[boundary]
            self._set_lag(number, bisect_left(self.starts, expected_s, boundary, self.count))
            heapq.heappush(self.flights, (self.arrival[number], number))

    def _land(self, boundary: int) -> None:
        """Release what has been written out by now."""
        while self.flights and self.flights[0][0] <= self.now:
            _, number = heapq.heappop(self.flights)
            interval = self.plan.intervals[number]
            if number in self.idle or (interval.end == boundary and not interval.wraps):
                continue
            self.boundaries[boundary].append((Kind.RELEASE, number))
            self._set_lag(number, boundary)
            self._leave(number, boundary)

    def _leave(self, number: int, boundary: int) -> None:
        """Note that the tensor is gone and queue its way back."""
        self.released[number] = boundary
        interval, route = self.plan.intervals[number], self.chosen.route[number]
        assert route is not None, "only what leaves can be gone"
        if not interval.wraps:
            self._queue(route, interval.end, number)
        elif self.task.workload.repeats:
            self._queue(route, interval.end + self.count, number)

    def _queue(self, route: int, due: int, number: int) -> None:
        """Let a tensor wait for its way back; the sign of its number says which of those due together is first."""
        sign = -1 if self.order.last_first else 1
        heapq.heappush(self.queues[route], (due, sign * number))

    def _load(self, boundary: int) -> None:
        """Start what fits into the memory of all runs up to its use."""
        for route, queue in enumerate(self.queues):
            while queue and self._fetch(route, boundary):
                pass

    def _fetch(self, route: int, boundary: int) -> bool:
        """Start the first copy back of a route if it fits; return whether it started."""
        queue = self.queues[route]
        due, number = queue[0][0], abs(queue[0][1])
        size = self.sizes[number]
        # Mostly asked in vain: the run that had no room the last time answers before all runs are looked at.
        crowded = self.crowded.get(number, -1)
        if crowded >= boundary and self.memory.item(crowded) + size > self.limit:
            return False
        ahead = self.memory[boundary : min(due, self.count)]
        if len(ahead):
            crowded = boundary + int(ahead.argmax())
            if self.memory.item(crowded) + size > self.limit:
                self.crowded[number] = crowded
                return False
        elif int(self.memory[boundary]) > self.limit:
            return False
        if due >= self.count and self.plan.intervals[number].wraps:
            held = self.memory[: self.loaded[number]]
            if len(held) and int(held.max()) + size > self.limit:
                return False
            held += size
            self.boundaries[self.loaded[number]].remove((Kind.LOAD, number))
            self.tail_loads.add(number)
        ahead += size
        heapq.heappop(queue)
        self._start_load(route, number, boundary)
        return True

    def _start_load(self, route: int, number: int, boundary: int) -> None:
        self.loaded[number] = boundary
        self.boundaries[boundary].append((Kind.LOAD, number))
        self.arrival[number] = self._enqueue(number, route, out=False)

    def _load_first(self, boundary: int) -> None:
        """Start what fits before anything leaves."""
        self._hold(boundary)
        leaving = sum(self.sizes[j] for j in self.begin_at[boundary])
        self.memory[boundary] += leaving
        self._load(boundary)
        self._load_beside(boundary)
        self.memory[boundary] -= leaving

    def _load_beside(self, boundary: int) -> None:
        """Start copies back for the next run beside what has yet to leave, while what the run makes is not there."""
        free = self._free_before(boundary)
        for route, queue in enumerate(self.queues):
            while queue and queue[0][0] <= boundary and self.sizes[abs(queue[0][1])] <= free:
                number = abs(heapq.heappop(queue)[1])
                free -= self.sizes[number]
                self._start_load(route, number, boundary)

    def _load_ahead(self, boundary: int) -> None:
        """Start copies back for later runs in the room of what is leaving; the next run waits until that is gone."""
        leaving = sum(self.sizes[j] for _, j in self.flights if j not in self.idle)
        for route, queue in enumerate(self.queues):
            while queue and boundary < queue[0][0] < self.count:
                due, number = queue[0][0], abs(queue[0][1])
                size = self.sizes[number]
                most = max(
                    int(self.memory[boundary]) - leaving, *self.memory[boundary + 1 : due], 0
                )
                if size > min(self._free_before(boundary), self.limit - most):
                    break
                heapq.heappop(queue)
                self.memory[boundary:due] += size
                self._start_load(route, number, boundary)

    def _free_before(self, boundary: int) -> int:
        """Return the bytes that are free before a run makes anything, and before what is due is back."""
        due = (
            self.sizes[j]
            for j in self.due_at[boundary]
            if j not in self.loaded and (j in self.released or self.plan.intervals[j].wraps)
        )
        return self.limit - self._after(boundary) + sum(due)

    def _land_before(self, number: int, boundary: int) -> None:
        """Release what is out before a tensor is back, so that its room is used while that is waited for."""
        until = self.arrival.get(number, 0.0) if number in self.loaded else 0.0
        while self.flights and self.now < self.flights[0][0] < until and any(self.queues):
            self.now = self.flights[0][0]
            self._land(boundary)
            self._load(boundary)

    def _arrive(self, number: int, boundary: int) -> None:
        """Wait for what the next run needs; what has not left by then stays."""
        interval = self.plan.intervals[number]
        if number not in self.loaded:
            self.idle.add(number)
            if number in self.chosen.stored:
                self.boundaries[boundary].append((Kind.STORED, number))
            self.now = max(self.now, self.arrival.get(number, 0.0))
            return
        self.boundaries[boundary].append((Kind.ARRIVE, number))
        self.now = max(self.now, self.arrival[number])
        if not interval.wraps and self.loaded[number] <= self.released[number]:
            self.idle.add(number)

    def _enqueue(self, number: int, route: int, *, out: bool) -> float:
        tensor = self.plan.intervals[number].tensor
        link, seconds, pipes = self.task.transfer(tensor, route, out=out)
        return self.links.issue(link, seconds, pipes, self.now) + seconds

    def _close(self) -> None:
        """End the list: what still leaves may cross the end."""
        self._land(self.count)
        leaving = [flight for flight in sorted(self.flights) if flight[1] not in self.idle]
        for flight in leaving:
            self._cross(*flight)
        for number in self.behind:
            at = self.released[number]
            moves = self.boundaries[at]
            place = beside(moves, self.sizes, self._after(at), number, self.limit)
            moves.insert(place, (Kind.RELEASE, number))

    def _cross(self, arrival: float, number: int) -> None:
        """Release behind the end what is not through before it."""
        interval = self.plan.intervals[number]
        if not self.task.workload.repeats:
            self.boundaries[self.count].append((Kind.RELEASE, number))
            self.released[number] = self.count
            return
        size = self.sizes[number]
        through = bisect_left(self.starts, arrival - self.now, 0, self.count)
        latest = min(through, self.loaded.get(number, interval.end))
        room = self.memory[:latest] + size > self.limit
        if room.any():
            latest = int(np.argmax(room))
        moved = (b for b in range(latest) if self.boundaries[b])
        latest = next((b for b in moved if self._most(b) + size > self.limit), latest)
        if latest == self.loaded.get(number):
            self.idle.add(number)
        self.memory[:latest] += size
        self.released[number] = latest
        self.behind.append(number)

    def _after(self, boundary: int) -> int:
        """Return what is held once all moves of a boundary are made."""
        return int(self.memory[boundary]) - int(self.plan.made[boundary])

    def _most(self, boundary: int) -> int:
        """Return the most that is held at a boundary, with what is to be released there."""
        there = sum(self.sizes[j] for j in self.behind if self.released[j] == boundary)
        return most_between(self.boundaries[boundary], self.sizes, self._after(boundary)) + there
