"""Occupancy: a bound from what must share the arena at one time.

A weight takes its whole room from the start of its load to the end of its op. At any moment at most one
op runs and each link carries at most one weight, and all of these must fit beside the residents. So an
iteration is divided into *occupancies* of the arena, each with an op, or none, and a load on each link, or
none, whose rooms together fit; how long each of them lasts is a linear program over classes of weights.

Sets: classes c of weights with about the same size; links l; ways v over one of them, directly from its place or
in two hops, fed over another; occupancies (o, f): o is a class whose streamed weight is in use, or 0, and f the
classes in flight, one or 0 per link.
Variables: x[c,v] weights streamed, y[o,f] seconds of each occupancy.

    minimise sum y, subject to
    sum_v x[c,v] <= num(c);  sum_{v from t} size(c) x[c,v] <= room(t), where v is from its home
    reserved of what is not streamed <= arena - region
    y only where reserved(o) + sum reserved(f) <= region
    sum y with o = c is sum_v x[c,v] * op_s(c);  sum y with f[l] = c is sum_{v over l} x[c,v] * transfer_s(c, l)
    sum y >= compute;  sum y >= transfers of a link;  sum y >= bytes of a pipe's links / its rate
    sum y with f[l] = c beside any f[m] is at most sum_{v over l} x[c,v] * held_s, where l and m share a pipe
    the longest op without weights has occupancies of its own, and what they load fits the region

The region is what residents leave. It is not known, so the range of its sizes is halved, the half with
the lower bound first: a range has the residents of its smallest and the occupancies of its largest region.

What waits half the way has no room in the arena, so where two hops are possible the same is said of the arena joined
with the memory in between: all that does not come from elsewhere rests in one or the other, and what does is in one or
the other from the start of its first hop to the end of its op. There the first hop is the link that is looked at.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations, product

import numpy as np

from gascompile.core.errors import SolverError
from gascompile.core.machine import Link, Pipe
from gascompile.core.workload import TensorKind
from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.bounds.linear_program import (
    INFINITY,
    Ending,
    LinearProgram,
    Loaded,
    solver_name,
)
from gascompile.passes.bounds.weight_classes import WeightClass, weight_classes
from gascompile.passes.model.problem import Problem
from gascompile.passes.model.ways import Way, ways_of

_LONG = 0.01
"""Share of the iteration from which on an op counts as long: the region fills up while it runs."""
_STEPS = 256
"""Sizes of the region to tell apart where there is a long op."""
_WHOLE = 1000.0
"""All weights in the program's unit of bytes, and the longest possible iteration in its unit of time."""
_TOLERANCE = 1e-6
"""The solver keeps rows up to this share."""
_MOST_SOLVED = 2_000
"""Programs that are solved for one bound, however long that takes."""


def occupancy(
    problem: Problem,
    arena_bytes: int,
    *,
    enough_s: float,
    time_limit_s: float,
    max_solved: int = _MOST_SOLVED,
    choices: Sequence[Sequence[Way]] | None = None,
) -> float:
    """Return a time that no schedule of whole weights within ``arena_bytes`` beats.

    Args:
        enough_s: the search for a better bound ends when the bound is as large.
        time_limit_s: seconds after which the bound found so far is returned.
        max_solved: programs after whose solution it is, on any machine.
        choices: sets of ways, of which a schedule keeps to one; those of ``ways_of`` where none are given.
    """
    deadline_s = time.perf_counter() + time_limit_s
    if not any(weight.uses for weight in problem.weights) or arena_bytes < 0:
        return problem.compute_s
    if solver_name() != "highs":
        return problem.compute_s
    bounds_s: list[float] = []
    long_op = _long_op(problem)
    long_s = 0.0 if long_op is None else problem.op_times_s[long_op]
    classes = cache(partial(weight_classes, problem))
    for ways in ways_of(problem) if choices is None else choices:
        bound_s = problem.compute_s
        for memory in _memories(problem, arena_bytes, ways):
            if bound_s < enough_s:
                task = _Task(problem, classes(len(memory.links)), long_s, memory)
                memory_s = _occupancy_of(task, enough_s, deadline_s, max_solved)
                bound_s = max(bound_s, memory_s)
        bounds_s.append(bound_s)
    return min(bounds_s)


def _occupancy_of(task: _Task, enough_s: float, deadline_s: float, max_solved: int) -> float:
    """Return a time that no schedule beats for want of room in one memory."""
    problem, memory = task.problem, task.memory
    if not task.classes:
        return problem.compute_s
    program = _Program(task)
    regions = _regions(task)
    ranges = [(problem.compute_s, 0, len(regions) - 1)]
    for _ in range(max_solved // 2):
        bound_s, first, end = ranges[0]
        if bound_s >= enough_s or end - first <= 1 or time.perf_counter() > deadline_s:
            break
        heapq.heappop(ranges)
        middle = (first + end) // 2
        for low, high in ((first, middle), (middle, end)):
            range_s = program.bound_s(memory.size_bytes - regions[low], regions[high] - 1)
            heapq.heappush(ranges, (max(bound_s, range_s), low, high))
    return ranges[0][0]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is looked at: the arena, or the arena and a place in between as if they were one."""

    size_bytes: int
    arena_bytes: int
    links: tuple[Link, ...]
    """Those that bring weights there, into the tier that computes first."""
    ways: tuple[tuple[Way, int], ...]
    """Each with the number of the link that brings its weights there."""
    place: str = ""
    """The one in between; what is at home there takes room as residents do."""


def _memories(problem: Problem, arena_bytes: int, ways: Sequence[Way]) -> Iterator[_Memory]:
    """Yield the places in between that weights may wait in, each joined with the arena, and the arena."""
    changing = {
        tensor.name for tensor in problem.workload.tensors if tensor.kind is TensorKind.STATE
    }
    changing.update(name for op in problem.workload.ops for name in op.writes)
    # What changes has no home at which it stays while it is in use.
    stays = changing.isdisjoint(weight.name for weight in problem.weights)
    between = (way.link.source_tier for way in ways if way.feed is not None and stays)
    for place in dict.fromkeys(between):
        into = [
            way.feed if way.feed is not None and way.link.source_tier == place else way.link
            for way in ways
        ]
        joined_bytes = arena_bytes + problem.room_bytes[place]
        yield _memory(joined_bytes, arena_bytes, ways, into, place)
    yield _memory(arena_bytes, arena_bytes, ways, [way.link for way in ways])


def _memory(
    size_bytes: int, arena_bytes: int, ways: Sequence[Way], into: Sequence[Link], place: str = ""
) -> _Memory:
    links = tuple(dict.fromkeys(into))
    numbered = tuple((way, links.index(link)) for way, link in zip(ways, into, strict=True))
    return _Memory(size_bytes, arena_bytes, links, numbered, place)


@dataclass(frozen=True, slots=True)
class _Task:
    problem: Problem
    classes: list[WeightClass]
    long_s: float
    """Seconds of the longest op where it is a long one, else 0."""
    memory: _Memory


def _long_op(problem: Problem) -> int | None:
    reading = {op for weight in problem.weights for op in weight.uses}
    times_s = problem.op_times_s
    others = (op for op in range(len(times_s)) if op not in reading)
    op = max(others, key=lambda op: times_s[op], default=None)
    if op is None or times_s[op] < _LONG * max(problem.compute_s, problem.streaming_s):
        return None
    return op


def _regions(task: _Task) -> list[int]:
    """Return the sizes at which more occupancies begin to fit, and one beyond the memory."""
    size_bytes, links = task.memory.size_bytes, task.memory.links
    rooms = {0, *(each.in_use_bytes for each in task.classes)}
    sums = {0}
    for _ in range(len(links) + 1):
        sums = {total + room for total in sums for room in rooms if total + room <= size_bytes}
    if task.long_s:
        loaded = sum(link.bandwidth_bytes_per_s for link in links) * task.long_s
        most = min(size_bytes, int(loaded) + max(sums))
        sums |= {most * step // _STEPS for step in range(_STEPS)}
    return [*sorted(sums), size_bytes + 1]


Terms = list[tuple[int, float]]


class _Program:
    """The linear program, built once; a range of regions only changes which occupancies fit and two rows."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        problem, classes = task.problem, task.classes
        self._unit = sum(weight.size_bytes for weight in problem.weights) / _WHOLE
        self._time_unit_s = (max(problem.compute_s, problem.streaming_s) or 1.0) / _WHOLE
        links = task.memory.links
        self._kinds = list(
            product(
                range(len(classes) + 1 + bool(task.long_s)),
                *(range(len(classes) + 1) for _ in links),
            )
        )
        rooms = [0, *(each.in_use_bytes for each in classes), 0]
        self._rooms = np.array([sum(rooms[c] for c in kind) for kind in self._kinds])
        self._program = LinearProgram("occupancy")
        for _ in self._kinds:
            self._program.add_variable(cost=1.0)
        for _ in range(len(classes) * len(task.memory.ways)):
            self._program.add_variable()
        self._add_kept()
        self._add_long_op()
        self._add_classes()
        self._add_arena()
        self._add_tiers()
        self._add_whole()
        self._add_overlaps()
        self._solver = Loaded(self._program)

    def bound_s(self, room_bytes: int, region_bytes: int) -> float:
        """Return the bound for residents of ``room_bytes`` beside occupancies that take ``region_bytes``."""
        kept = sum(each.count * each.kept_bytes for each in self._task.classes)
        self._solver.bound_row(0, (kept - room_bytes) / self._unit, INFINITY)
        self._solver.bound_row(1, -INFINITY, region_bytes / self._unit)
        self._solver.bound_columns(np.where(self._rooms <= region_bytes, INFINITY, 0.0))
        try:
            outcome = self._solver.solve()
        except SolverError:
            # Nothing is proven where the solver stumbles.
            return 0.0
        if outcome.ending is Ending.OPTIMAL:
            return max(0.0, outcome.bound) * self._time_unit_s * (1 - _TOLERANCE)
        return math.inf if outcome.ending is Ending.INFEASIBLE else 0.0

    def _streamed(self, number: int, way: int) -> int:
        """Return the column of ``x``; those of ``y`` come first."""
        return len(self._kinds) + number * len(self._task.memory.ways) + way

    def _occupancies(self, position: int, number: int) -> Terms:
        """Return the occupancies whose op (position 0) or link (from 1 on) has class ``number``."""
        return [(i, 1.0) for i, kind in enumerate(self._kinds) if kind[position] == number]

    def _each(self) -> Iterator[tuple[WeightClass, int, Way]]:
        """Yield each class with each way, and the column of what comes so."""
        for number, each in enumerate(self._task.classes):
            for position, (way, _) in enumerate(self._task.memory.ways):
                yield each, self._streamed(number, position), way

    def _add_kept(self) -> None:
        place = self._task.memory.place
        terms = [
            (
                column,
                # At home in the place in between it takes room all the same.
                (each.kept_bytes - (each.size_bytes if way.home == place else 0)) / self._unit,
            )
            for each, column, way in self._each()
        ]
        self._program.add_row(0.0, math.inf, terms)

    def _add_arena(self) -> None:
        """What never comes is in the arena."""
        terms = [(column, each.kept_bytes / self._unit) for each, column, _ in self._each()]
        kept = sum(each.count * each.kept_bytes for each in self._task.classes)
        least = (kept - self._task.memory.arena_bytes) / self._unit
        self._program.add_row(least, math.inf, terms)

    def _add_long_op(self) -> None:
        """Each load beside the long op has its whole room in the region when the op ends."""
        long = self._occupancies(0, len(self._task.classes) + 1)
        links = self._task.memory.links
        rates = {(0, position): 0.0 for position in range(len(links))}
        for number, each in enumerate(self._task.classes):
            for position, link in enumerate(links):
                taken = each.size_bytes / link.transfer_time_s(each.size_bytes)
                rates[number + 1, position] = taken * self._time_unit_s / self._unit
        loaded = [
            (i, sum(rates[c, position] for position, c in enumerate(self._kinds[i][1:])))
            for i, _ in long
        ]
        self._program.add_row(-math.inf, math.inf, loaded)
        seconds = self._task.long_s / self._time_unit_s
        self._program.add_row(seconds, seconds, long)

    def _add_classes(self) -> None:
        ways, links = self._task.memory.ways, self._task.memory.links
        for number, each in enumerate(self._task.classes):
            over = [self._streamed(number, way) for way in range(len(ways))]
            self._program.add_row(0.0, each.count, [(column, 1.0) for column in over])
            held = [(column, -each.op_s / self._time_unit_s) for column in over]
            self._program.add_row(0.0, 0.0, [*self._occupancies(0, number + 1), *held])
            for position, link in enumerate(links):
                moving = self._occupancies(position + 1, number + 1)
                seconds = _seconds(each, link) / self._time_unit_s
                loaded = [
                    (column, -seconds)
                    for column, (_, brought) in zip(over, ways, strict=True)
                    if brought == position
                ]
                self._program.add_row(0.0, 0.0, [*moving, *loaded])

    def _add_tiers(self) -> None:
        for tier, room_bytes in self._task.problem.room_bytes.items():
            terms = [
                (column, each.size_bytes / self._unit)
                for each, column, way in self._each()
                if way.home == tier
            ]
            self._program.add_row(-math.inf, room_bytes / self._unit, terms)

    def _add_whole(self) -> None:
        every = [(i, 1.0) for i in range(len(self._kinds))]
        self._program.add_row(self._task.problem.compute_s / self._time_unit_s, math.inf, every)
        ways = [way for way, _ in self._task.memory.ways]
        for link in dict.fromkeys(x for way in ways for x in (way.link, way.feed) if x is not None):
            terms = [
                (column, -_seconds(each, link) / self._time_unit_s)
                for each, column, way in self._each()
                if link in (way.link, way.feed)
            ]
            self._program.add_row(0.0, math.inf, [*every, *terms])
        machine = self._task.problem.machine
        for pipe in machine.pipes:
            rate = pipe_rate(machine, pipe) * self._time_unit_s
            terms = [
                (column, -each.size_bytes / rate)
                for each, column, way in self._each()
                for _ in range(way.uses(pipe.name))
            ]
            self._program.add_row(0.0, math.inf, [*every, *terms])

    def _add_overlaps(self) -> None:
        """Of links that share a pipe one begins once the other's bytes have passed there: hardly any at once.

        A load overlaps with those of the other link while it ends and while the one before it ends.
        """
        links, machine = self._task.memory.links, self._task.problem.machine
        sizes = [weight.size_bytes for weight in self._task.problem.weights if weight.uses]
        for pipe in machine.pipes:
            inside = [i for i, link in enumerate(links) if pipe.name in link.shared]
            for one, other in permutations(inside, 2):
                rest_s = max(_held_s(links[other], pipe, size) for size in sizes)
                for number, each in enumerate(self._task.classes):
                    both = [
                        (i, 1.0)
                        for i, kind in enumerate(self._kinds)
                        if kind[one + 1] == number + 1 and kind[other + 1]
                    ]
                    most_s = _held_s(links[one], pipe, each.size_bytes) + rest_s
                    loads = [
                        (self._streamed(number, way), -most_s / self._time_unit_s)
                        for way, (_, brought) in enumerate(self._task.memory.ways)
                        if brought == one
                    ]
                    self._program.add_row(-math.inf, 0.0, [*both, *loads])


def _held_s(link: Link, pipe: Pipe, size_bytes: int) -> float:
    """Return how long a transfer still has its link once its bytes have passed a pipe."""
    slower = 1 / link.bandwidth_bytes_per_s - 1 / pipe.bandwidth_bytes_per_s
    return link.latency_s + size_bytes * max(0.0, slower)


def _seconds(each: WeightClass, link: Link) -> float:
    """Return what a unit of a class takes on a link."""
    return each.transfers * link.latency_s + each.size_bytes / link.bandwidth_bytes_per_s
