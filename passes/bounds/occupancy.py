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
    sum y >= compute;  sum y >= transfers of a link that feeds;  sum y >= bytes of a pipe's links / its rate
    the longest op without weights has occupancies of its own, and what they load fits the region

The region is what residents leave. It is not known, so the range of its sizes is halved, the half with
the lower bound first: a range has the residents of its smallest and the occupancies of its largest region.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from gascompile.core.errors import SolverError
from gascompile.core.machine import Link
from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.bounds.linear_program import (
    INFINITY,
    Ending,
    LinearProgram,
    Loaded,
    solver_name,
)
from gascompile.passes.model.problem import Problem, Weight
from gascompile.passes.model.ways import Way, ways_of

_MOST_CLASSES = {1: 16, 2: 8, 3: 4}
"""By the number of links; for more links there are too many occupancies."""
_MOST_SIZES = 512
"""Where more sizes differ, those next to each other are one from the start."""
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


@dataclass(frozen=True, slots=True)
class _Class:
    """Weights of about the same size, counted in units of the smallest one's bytes.

    What is said of a unit holds for every member's share of it at least.
    """

    count: float
    size_bytes: int
    in_use_bytes: int
    """What any one of the weights takes in the arena."""
    kept_bytes: float
    """What a unit takes in the arena where it stays."""
    transfers: float
    """Transfers per unit."""
    op_s: float
    """Seconds for which an op holds a unit."""


def occupancy(
    problem: Problem,
    arena_bytes: int,
    *,
    enough_s: float,
    time_limit_s: float,
    max_solved: int = _MOST_SOLVED,
) -> float:
    """Return a time that no schedule of whole weights within ``arena_bytes`` beats.

    Args:
        enough_s: the search for a better bound ends when the bound is as large.
        time_limit_s: seconds after which the bound found so far is returned.
        max_solved: programs after whose solution it is, on any machine.
    """
    deadline_s = time.perf_counter() + time_limit_s
    long_op = _long_op(problem)
    classes = _classes(problem)
    if not classes or arena_bytes < 0 or solver_name() != "highs":
        return problem.compute_s
    long_s = 0.0 if long_op is None else problem.op_times_s[long_op]
    task = _Task(problem, classes, long_s, ways_of(problem))
    program = _Program(task)
    regions = _regions(task, arena_bytes)
    ranges = [(problem.compute_s, 0, len(regions) - 1)]
    for _ in range(max_solved // 2):
        bound_s, first, end = ranges[0]
        if bound_s >= enough_s or end - first <= 1 or time.perf_counter() > deadline_s:
            break
        heapq.heappop(ranges)
        middle = (first + end) // 2
        for low, high in ((first, middle), (middle, end)):
            range_s = program.bound_s(arena_bytes - regions[low], regions[high] - 1)
            heapq.heappush(ranges, (max(bound_s, range_s), low, high))
    return ranges[0][0]


@dataclass(frozen=True, slots=True)
class _Task:
    problem: Problem
    classes: list[_Class]
    long_s: float
    """Seconds of the longest op where it is a long one, else 0."""
    ways: tuple[Way, ...]


def _long_op(problem: Problem) -> int | None:
    reading = {op for weight in problem.weights for op in weight.uses}
    times_s = problem.op_times_s
    others = (op for op in range(len(times_s)) if op not in reading)
    op = max(others, key=lambda op: times_s[op], default=None)
    if op is None or times_s[op] < _LONG * max(problem.compute_s, problem.streaming_s):
        return None
    return op


_Group = list[tuple[Weight, float]]
"""Weights of about the same size, each with the seconds of the ops that hold it."""


def _classes(problem: Problem) -> list[_Class]:
    """Return classes of the weights, the smallest first; each op is held by the largest weight it reads."""
    weights = [weight for weight in problem.weights if weight.uses]
    largest: dict[int, str] = {}
    for weight in sorted(weights, key=lambda weight: weight.size_bytes):
        largest.update(dict.fromkeys(weight.uses, weight.name))
    by_size: dict[int, _Group] = {}
    for weight in weights:
        held = [op for op in weight.uses if largest[op] == weight.name]
        op_s = sum(problem.op_times_s[op] for op in held)
        by_size.setdefault(weight.size_bytes, []).append((weight, op_s))
    most = _MOST_CLASSES.get(len(problem.links), 0)
    groups = [by_size[size] for size in sorted(by_size) if size] if most else []
    return [_class(group) for group in _merged(groups, most)]


def _merged(groups: list[_Group], most: int) -> list[_Group]:
    """Return at most ``most`` groups: neighbours that hold few bytes become one."""
    if len(groups) > _MOST_SIZES:
        step = -(-len(groups) // _MOST_SIZES)
        groups = [list(chain(*groups[i : i + step])) for i in range(0, len(groups), step)]
    totals = [sum(weight.size_bytes for weight, _ in group) for group in groups]
    while len(groups) > most:
        i = min(range(len(groups) - 1), key=lambda i: totals[i] + totals[i + 1])
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
        totals[i : i + 2] = [totals[i] + totals[i + 1]]
    return groups


def _class(group: _Group) -> _Class:
    unit = min(weight.size_bytes for weight, _ in group)
    return _Class(
        count=sum(weight.size_bytes for weight, _ in group) / unit,
        size_bytes=unit,
        in_use_bytes=min(weight.reserved_bytes for weight, _ in group),
        kept_bytes=min(weight.reserved_bytes * unit / weight.size_bytes for weight, _ in group),
        transfers=min(unit / weight.size_bytes for weight, _ in group),
        op_s=min(op_s * unit / weight.size_bytes for weight, op_s in group),
    )


def _regions(task: _Task, arena_bytes: int) -> list[int]:
    """Return the sizes at which more occupancies begin to fit, and one beyond the arena."""
    rooms = {0, *(each.in_use_bytes for each in task.classes)}
    sums = {0}
    for _ in range(len(task.problem.links) + 1):
        sums = {total + room for total in sums for room in rooms if total + room <= arena_bytes}
    if task.long_s:
        sums |= {arena_bytes * step // _STEPS for step in range(_STEPS)}
    return [*sorted(sums), arena_bytes + 1]


Terms = list[tuple[int, float]]


class _Program:
    """The linear program, built once; a range of regions only changes which occupancies fit and two rows."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        problem, classes = task.problem, task.classes
        self._unit = sum(weight.size_bytes for weight in problem.weights) / _WHOLE
        self._time_unit_s = (max(problem.compute_s, problem.streaming_s) or 1.0) / _WHOLE
        links = range(len(problem.links))
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
        for _ in range(len(classes) * len(task.ways)):
            self._program.add_variable()
        self._add_kept()
        self._add_long_op()
        self._add_classes()
        self._add_tiers()
        self._add_whole()
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
        return len(self._kinds) + number * len(self._task.ways) + way

    def _occupancies(self, position: int, number: int) -> Terms:
        """Return the occupancies whose op (position 0) or link (from 1 on) has class ``number``."""
        return [(i, 1.0) for i, kind in enumerate(self._kinds) if kind[position] == number]

    def _each(self) -> Iterator[tuple[_Class, int, Way]]:
        """Yield each class with each way, and the column of what comes so."""
        for number, each in enumerate(self._task.classes):
            for position, way in enumerate(self._task.ways):
                yield each, self._streamed(number, position), way

    def _add_kept(self) -> None:
        terms = [(column, each.kept_bytes / self._unit) for each, column, _ in self._each()]
        self._program.add_row(0.0, math.inf, terms)

    def _add_long_op(self) -> None:
        """Each load beside the long op has its whole room in the region when the op ends."""
        long = self._occupancies(0, len(self._task.classes) + 1)
        rates = {(0, position): 0.0 for position in range(len(self._task.problem.links))}
        for number, each in enumerate(self._task.classes):
            for position, link in enumerate(self._task.problem.links):
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
        ways = self._task.ways
        for number, each in enumerate(self._task.classes):
            over = [self._streamed(number, way) for way in range(len(ways))]
            self._program.add_row(0.0, each.count, [(column, 1.0) for column in over])
            held = [(column, -each.op_s / self._time_unit_s) for column in over]
            self._program.add_row(0.0, 0.0, [*self._occupancies(0, number + 1), *held])
            for position, link in enumerate(self._task.problem.links):
                moving = self._occupancies(position + 1, number + 1)
                seconds = _seconds(each, link) / self._time_unit_s
                loaded = [
                    (column, -seconds)
                    for column, way in zip(over, ways, strict=True)
                    if way.position == position
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
        for feed in {way.feed.name: way.feed for way in self._task.ways if way.feed}.values():
            terms = [
                (column, -_seconds(each, feed) / self._time_unit_s)
                for each, column, way in self._each()
                if way.feed == feed
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


def _seconds(each: _Class, link: Link) -> float:
    """Return what a unit of a class takes on a link."""
    return each.transfers * link.latency_s + each.size_bytes / link.bandwidth_bytes_per_s
