"""Interval exact: the fastest steps of a small problem, found by going through all lists of steps.

A label is a place in the list, where each tensor is, and *when*: rows of the (max, +) matrix that maps the
times at the start of an iteration (clock, links, pipes, transfers in flight) to the times here. Steps only
delay what depends on them, so of two labels at the same place the one that is nowhere later makes the other
useless. Labels that cannot beat the best known plan are dropped: if none is left, that plan is the optimum.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, product

from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.cost_models.simulate.clock import Clock
from gascompile.passes.intervals.recompute import may_run_again
from gascompile.passes.model.interval_problem import IntervalProblem
from gascompile.passes.search.max_plus import Row, cycle_mean, later, nowhere_later, shifted
from gascompile.passes.search.needed_steps import needed_steps

_MOST_TENSORS = 8  # lists of steps multiply with each
_MOST_OPS = 8  # and with each op
_MOST_STARTS = 2000  # what may be where at the start: each is searched from
_EPSILON = 1e-9  # rounding of sums of seconds

ABSENT, PRESENT, ARRIVING, LEAVING = range(4)
Status = tuple[int, int, int]
"""Where a tensor is, the route of its transfer (-1: none), and a bit per route with a fresh copy."""
_GONE: Status = (ABSENT, -1, 0)


_Known = dict[tuple[int, int, tuple[Status, ...]], list[Row]]
"""The times of labels, by the start, the place in the list and where each tensor is."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """What going through everything showed."""

    complete: bool
    """Whether nothing was left out; then nothing is faster than ``seconds`` and the plan known before."""
    seconds: float
    """Infinite where nothing faster than the plan known before was found."""
    steps: tuple[Step, ...]
    homes: dict[int, int]
    """Route of the home of each persistent tensor that is at home on a slow tier."""


@dataclass(slots=True, eq=False)
class _Label:
    start: int
    turn: int
    held: tuple[Status, ...]
    core: tuple[Row, ...]
    """Rows of the clock, the links and the pipes."""
    flights: dict[int, Row]
    parent: _Label | None = None
    steps: tuple[Step, ...] = field(default=())


def interval_exact(
    task: IntervalProblem, known_s: float, *, time_limit_s: float, max_labels: int
) -> Optimum | None:
    """Return the optimum if it is faster than ``known_s``; ``None`` for what is too large to go through."""
    small = len(task.sizes) <= _MOST_TENSORS and len(task.reads) <= _MOST_OPS
    if not small or not _covered(task):
        return None
    return _Search(task, known_s).run(time_limit_s, max_labels)


def _covered(task: IntervalProblem) -> bool:
    """Whether room on slow tiers never counts, and each activation has one op that makes it."""
    everything = sum(task.sizes)
    roomy = all(route.room_bytes >= everything for route in task.routes)
    return roomy and all(
        task.persistent[tensor]
        or all(tensor in _read_names(task, op) for op in task.writers[tensor][1:])
        for tensor in task.writers
    )


def _read_names(task: IntervalProblem, op: int) -> set[int]:
    number = {name: x for x, name in enumerate(task.names)}
    return {number[name] for name in task.workload.ops[op].reads if name in number}


class _Search:
    def __init__(self, task: IntervalProblem, known_s: float) -> None:
        self.task = task
        self.known_s = known_s
        self.repeats = task.workload.repeats
        self.count = len(task.reads)
        self.touched = [(*task.reads[i], *task.writes[i]) for i in range(self.count)]
        self.born = [
            [x for x in task.writes[i] if not task.persistent[x] and task.writers[x][0] == i]
            for i in range(self.count)
        ]
        self.left_s = [sum(task.op_times_s[i:]) for i in range(self.count + 1)]
        self.recomputations = [
            [s for s in range(p) if may_run_again(task, s, p)] for p in range(self.count + 1)
        ]
        self.wanted = [self._wanted(p) for p in range(self.count + 1)]
        self.starts: list[tuple[Status, ...]] = []

    def _wanted(self, place: int) -> frozenset[int]:
        """Return what an op or a recomputation from ``place`` on may still read, and what stays to the end."""
        task = self.task
        wanted = {x for op in range(place, self.count) for x in self.touched[op]}
        wanted |= {x for x, stays in enumerate(task.stays_to_end) if stays}
        for other in range(place, self.count + 1):
            for source in self.recomputations[other]:
                wanted |= set(task.reads[source])
        return frozenset(wanted)

    def run(self, time_limit_s: float, max_labels: int) -> Optimum | None:
        options = [self._options(x) for x in range(len(self.task.sizes))]
        if math.prod(map(len, options)) > _MOST_STARTS:
            return None
        deadline_s = time.perf_counter() + time_limit_s
        queue: list[tuple[float, int, int, _Label]] = []
        known: _Known = {}
        for held in product(*options):
            if self._bytes(held) <= self.task.limit_bytes:
                self.starts.append(held)
                label = self._start(len(self.starts) - 1, held)
                queue.append((self._bound(label), 0, len(queue), label))
        heapq.heapify(queue)
        labels = len(queue)
        while queue:
            bound, _, _, label = heapq.heappop(queue)
            if bound >= self.known_s * (1 - _EPSILON):
                break
            if label.turn > self.count:
                return Optimum(True, bound, self._steps(label), self._homes(label.start))
            if label.parent and _times(label) not in known[label.start, label.turn, label.held]:
                continue
            if labels > max_labels or time.perf_counter() > deadline_s:
                return Optimum(False, math.inf, (), {})
            for child in self._successors(label):
                if _is_new(child, known):
                    labels += 1
                    heapq.heappush(queue, (self._bound(child), -child.turn, labels, child))
        return Optimum(True, math.inf, (), {})

    def _options(self, x: int) -> list[Status]:
        """Return where a tensor may be when the list begins."""
        task = self.task
        if not task.persistent[x]:
            return [_GONE]
        routes = [r for r in range(len(task.routes)) if task.can_take(x, r)]
        used = any(x in touched for touched in self.touched)
        statuses: list[Status] = [(PRESENT, -1, 0)] if used or not routes else []
        statuses += [(ABSENT, -1, 1 << r) for r in (routes if used else routes[:1])]
        if not self.repeats or not used:
            return statuses
        statuses += [(PRESENT, -1, 1 << r) for r in routes]
        statuses += [(ARRIVING, r, 1 << r) for r in routes]
        if task.written[x]:
            masks = [
                m for m in range(1 << len(task.routes)) if not m & ~sum(1 << r for r in routes)
            ]
            statuses += [(LEAVING, r, mask) for r in routes for mask in masks if not mask >> r & 1]
            several = [mask for mask in masks if mask.bit_count() > 1]
            statuses += [(loc, -1, mask) for loc in (ABSENT, PRESENT) for mask in several]
            statuses += [(ARRIVING, r, mask) for r in routes for mask in several if mask >> r & 1]
        return statuses

    def _start(self, number: int, held: tuple[Status, ...]) -> _Label:
        machine = self.task.machine
        flying = [x for x, status in enumerate(held) if status[0] >= ARRIVING]
        num_core = 1 + len(machine.links) + len(machine.pipes)
        columns = num_core + len(flying) if self.repeats else 1
        rows: list[Row] = [(0.0,)] * num_core
        if self.repeats:
            rows = [
                tuple(0.0 if c == r else -math.inf for c in range(columns)) for r in range(columns)
            ]
        core = tuple(later(row, rows[0]) for row in rows[:num_core])
        return _Label(number, 0, held, core, dict(zip(flying, rows[num_core:], strict=True)))

    def _bytes(self, held: tuple[Status, ...]) -> int:
        return sum(
            size for size, status in zip(self.task.sizes, held, strict=True) if status[0] != ABSENT
        )

    def _bound(self, label: _Label) -> float:
        """Return what no completion falls below; the time itself of a complete label."""
        if label.turn > self.count:
            if not self.repeats:
                return label.core[0][0]
            return cycle_mean([*label.core, *label.flights.values()])
        bound = label.core[0][0] + self.left_s[label.turn]
        if self.repeats:
            links = range(1, 1 + len(self.task.machine.links))
            bound = max(bound, max((label.core[link][link] for link in links), default=0.0))
        return bound

    def _successors(self, label: _Label) -> Iterator[_Label]:
        task = self.task
        free = task.limit_bytes - self._bytes(label.held)
        for x, (loc, _, fresh) in enumerate(label.held):
            copied = bool(fresh) or (not task.persistent[x] and loc == PRESENT)
            if loc == LEAVING or (loc == PRESENT and copied):
                yield from self._release(label, x)
            for route in range(len(task.routes)):
                if loc == PRESENT and not fresh >> route & 1 and self._may_offload(x, route):
                    yield from self._transfer(label, x, route, away=True)
                if loc == ABSENT and fresh >> route & 1 and task.sizes[x] <= free:
                    yield from self._transfer(label, x, route, away=False)
        for source in self.recomputations[label.turn] if label.turn < self.count else ():
            gone = [x for x in task.writes[source] if label.held[x][0] == ABSENT]
            if any(x in self.wanted[label.turn] for x in gone):
                yield from self._run(label, source, free, again=True)
        if label.turn < self.count:
            yield from self._run(label, label.turn, free, again=False)
        else:
            yield from self._end(label)

    def _may_offload(self, x: int, route: int) -> bool:
        """Whether a copy out may help: what ops of a repeating list never write has its first copy, or none ever."""
        clean = self.repeats and self.task.persistent[x] and not self.task.written[x]
        return not clean and self.task.routes[route].link_out is not None

    def _release(self, label: _Label, x: int) -> Iterator[_Label]:
        name = self.task.names[x]
        loc, route, fresh = label.held[x]
        core, flights = list(label.core), dict(label.flights)
        steps: list[Step] = []
        if loc == LEAVING:
            core[0] = later(core[0], flights.pop(x))
            fresh |= 1 << route
            steps.append(Wait(op=label.turn, tensor=name))
        steps.append(Release(op=label.turn, tensor=name))
        held = _with(label.held, x, (ABSENT, -1, fresh))
        yield from self._simplest(label, label.turn, held, core, flights, steps)

    def _transfer(self, label: _Label, x: int, route: int, *, away: bool) -> Iterator[_Label]:
        task = self.task
        number, seconds, pipes = task.transfer(x, route, out=away)
        link, first_pipe = task.machine.links[number], len(task.machine.links)
        columns: list[Row] = []
        arrival: list[float] = []
        for now, *free in zip(*label.core, strict=True):
            # What one time at the start of the iteration makes of all times here.
            clock = Clock(free[:first_pipe], free[first_pipe:])
            arrival.append(clock.issue(number, seconds, pipes, now) + seconds)
            columns.append((now, *clock.times()))
        core = list(zip(*columns, strict=True))
        step = (Offload if away else Reload)(
            op=label.turn, tensor=task.names[x], link=link.name, size_bytes=task.sizes[x]
        )
        status = (LEAVING if away else ARRIVING, route, label.held[x][2])
        flights = {**label.flights, x: tuple(arrival)}
        held = _with(label.held, x, status)
        yield from self._simplest(label, label.turn, held, core, flights, [step])

    def _run(self, label: _Label, op: int, free: int, *, again: bool) -> Iterator[_Label]:
        task = self.task
        held, core, flights = list(label.held), list(label.core), dict(label.flights)
        made = [x for x in task.writes[op] if held[x][0] == ABSENT]
        need = sum(task.sizes[x] for x in made) + task.workload.ops[op].workspace_bytes
        if need > free or not (again or set(made) <= set(self.born[op])):
            return
        steps: list[Step] = []
        for x in task.reads[op] if again else self.touched[op]:
            loc, _, fresh = held[x]
            if loc == ABSENT and x not in made:
                return
            if loc == ARRIVING:
                core[0] = later(core[0], flights.pop(x))
                held[x] = (PRESENT, -1, fresh)
                steps.append(Wait(op=label.turn, tensor=task.names[x]))
        if any(x in flights for x in task.writes[op]):
            return
        for x in task.writes[op]:
            held[x] = (PRESENT, -1, 0)
        steps.append(Recompute(op=label.turn, source=op) if again else Compute(op=op))
        core[0] = shifted(core[0], task.op_times_s[op])
        turn = label.turn + (not again)
        yield from self._simplest(label, turn, tuple(held), core, flights, steps)

    def _end(self, label: _Label) -> Iterator[_Label]:
        task, start = self.task, self.starts[label.start]
        held, core, flights = list(label.held), list(label.core), dict(label.flights)
        steps: list[Step] = []
        for x in list(flights):
            if self.repeats and task.persistent[x]:
                continue
            loc, route, fresh = held[x]
            core[0] = later(core[0], flights.pop(x))
            held[x] = (PRESENT, -1, fresh | (1 << route if loc == LEAVING else 0))
            steps.append(Wait(op=self.count, tensor=task.names[x]))
        for x, stays in enumerate(task.stays_to_end):
            if stays and held[x][0] != PRESENT and x in task.writers:
                return
            if not task.persistent[x]:
                held[x] = _GONE
            elif not self.repeats:
                at_home = (
                    held[x][0] == PRESENT if start[x][0] == PRESENT else held[x][2] & start[x][2]
                )
                if not at_home:
                    return
        for child in self._simplest(label, self.count + 1, tuple(held), core, flights, steps):
            if not self.repeats or child.held == start:
                yield child

    def _simplest(
        self,
        label: _Label,
        turn: int,
        held: tuple[Status, ...],
        core: list[Row],
        flights: dict[int, Row],
        steps: list[Step],
    ) -> Iterator[_Label]:
        """Yield the label in its simplest form: arrived is arrived, and what nothing reads is gone."""
        task, states = self.task, list(held)
        place = min(turn, self.count)
        flights = {x: later(flights[x], core[0]) for x in sorted(flights)} if flights else {}
        for x in [x for x, row in flights.items() if row == core[0]]:
            del flights[x]
            loc, route, fresh = states[x]
            states[x] = (PRESENT, -1, fresh | (1 << route if loc == LEAVING else 0))
            steps.append(Wait(op=place, tensor=task.names[x]))
        wanted = self.wanted[place]
        for x, status in enumerate(states):
            if x not in wanted and status != _GONE and not task.persistent[x]:
                if x in flights:
                    return
                states[x] = _GONE
        now = core[0]
        rows = (now, *[later(row, now) for row in core[1:]])
        yield _Label(label.start, turn, tuple(states), rows, flights, label, tuple(steps))

    def _steps(self, label: _Label) -> tuple[Step, ...]:
        steps: list[Step] = []
        at: _Label | None = label
        while at is not None:
            steps = [*at.steps, *steps]
            at = at.parent
        return needed_steps(self.task, steps)

    def _homes(self, start: int) -> dict[int, int]:
        homes: dict[int, int] = {}
        for x, (_, route, fresh) in enumerate(self.starts[start]):
            if self.task.persistent[x] and (fresh or route >= 0):
                homes[x] = route if route >= 0 else fresh.bit_length() - 1
                if not self.repeats and self.starts[start][x][0] == PRESENT:
                    del homes[x]
        return homes


def _is_new(label: _Label, known: _Known) -> bool:
    """Keep the label unless one at the same place is nowhere later; forget those that it beats."""
    times = _times(label)
    kept = known.setdefault((label.start, label.turn, label.held), [])
    for other in kept:
        if nowhere_later(other, times):
            return False
    kept[:] = [other for other in kept if not nowhere_later(times, other)]
    kept.append(times)
    return True


def _times(label: _Label) -> Row:
    """Return all rows of a label in a row: at the same place, with the same in flight, they are as many."""
    return tuple(chain.from_iterable((*label.core, *label.flights.values())))


def _with(held: tuple[Status, ...], x: int, status: Status) -> tuple[Status, ...]:
    return (*held[:x], status, *held[x + 1 :])
