"""One iteration of a plan as timed events, and how long it takes.

Every time is a longest path: a wait is a maximum, an op or a transfer a sum. An iteration is then a linear
map in max-plus algebra and the steady state of a repeating program is that map's eigenvalue. It is
found by iterating until the state recurs, and by Karp's theorem where that takes long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gascompile.core.crossing import crossing
from gascompile.cost_models.simulate.clock import Clock, Pipes

COMPUTE, PREFETCH, WAIT = 0, 1, 2
ELSEWHERE, CROSS, ARRIVE = 3, 4, 5
"""An op of another site; a copy between sites starts, and is waited for."""
MEET, FOLLOW = 6, 7
"""Another site waits for a copy; the tier that computes waits for an op of another site."""
PUSH = 8
"""A copy starts, once the one that it follows is there."""
_MAX_ITERATIONS = 12  # until times repeat; if not, the (max, +) matrix tells
_TOLERANCE_S = 1e-12  # rounding of sums of seconds

Event = tuple[int, int, float]
"""``(COMPUTE, op, seconds) | (PREFETCH, copy, seconds on the link) | (WAIT, copy, 0.0)``, and of several sites
``(ELSEWHERE, clock, seconds) | (CROSS, copy, seconds on the link) | (ARRIVE, copy, 0.0) | (MEET, copy, clock)
| (FOLLOW, number of the op among those elsewhere, 0.0)``, and of two hops ``(PUSH, copy, seconds on the link)``."""


@dataclass(frozen=True, slots=True)
class EventProgram:
    """One iteration as events over numbered copies of tensors."""

    events: Sequence[Event]
    link_of: Sequence[int]
    """Link index of each copy."""
    pipes_of: Sequence[Pipes]
    """What each copy takes of pipes."""
    repeats: bool
    num_links: int
    num_pipes: int
    num_sites: int = 1
    """Streams of ops. An iteration begins and ends for all of them at once."""
    site_of: Sequence[int] = ()
    """Per copy between sites the clock at its other end, negative where it comes from there."""
    step_of: Sequence[int] = ()
    """The step of a plan that each event is of."""
    give_s: Sequence[float] = ()
    """Per copy between sites what it takes of the time of the one that hands it over."""
    start_s: float = 0.0
    """When the other sites come to the first of their ops."""
    source_of: Mapping[int, int] = field(default_factory=dict)
    """Per copy of a second hop the one of the first."""
    wake_s: float = 0.0
    """How much later than a copy between sites ends who waits for it goes on."""

    def crossing(self) -> list[int]:
        """Return the copies that are issued before the first iteration, in the order of their first use."""
        order = crossing(self._touches())
        # What follows another copy is issued behind it.
        return sorted(order, key=lambda copy: copy in self.source_of)

    def _touches(self) -> Iterator[tuple[int, bool]]:
        """Yield the copies that events touch, each with whether it starts there."""
        for kind, copy, _ in self.events:
            if kind == PUSH:
                yield self.source_of[copy], False
            if kind not in (COMPUTE, ELSEWHERE, FOLLOW):
                yield copy, kind in (PREFETCH, CROSS, PUSH)


class EventTimes(NamedTuple):
    """Of an event."""

    at_s: float
    """When it is come to."""
    begun_s: float
    """When a transfer has its link."""
    ended_s: float
    """Of a transfer its arrival."""
    latest_s: float
    """What all sites are at then."""


class Record:
    """What the last iteration of some was like, event by event."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[EventTimes] = []
        self.holders: dict[int, int | None] = {}
        """The copy that had the link of each one, or a pipe of it, the longest when it was issued."""
        self.before: tuple[float, list[EventTimes]] = (0.0, [])
        """Seconds and events of the iteration before."""
        self._last: dict[tuple[bool, int], int] = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self.before, self.events = (self.seconds, self.events), []

    def take_link(self, program: EventProgram, clock: Clock, copy: int) -> None:
        """Take note that a copy is issued."""
        link = program.link_of[copy]
        frees = [(clock.link_free[link], (False, link))]
        frees += [(clock.pipe_free[pipe], (True, pipe)) for pipe, _ in program.pipes_of[copy]]
        self.holders[copy] = self._last.get(max(frees)[1])
        self._last.update(dict.fromkeys((key for _, key in frees), copy))


def steady_seconds(program: EventProgram) -> float:
    """Return the seconds of one iteration; in the steady state where the program repeats."""
    return steady_iteration(program)[0]


def steady_iteration(
    program: EventProgram, record: Record | None = None
) -> tuple[float, list[tuple[int, float]]]:
    """Return the seconds of the steady iteration and its stalls as ``(number of the wait, seconds)``.

    Args:
        program: what to time.
        record: to be filled with the iteration, one of those between which the steady state alternates.
    """
    clock = Clock.of(program.num_links, program.num_pipes)
    arrival = [0.0] * len(program.link_of)
    stalls: list[tuple[int, float]] = []
    if not program.repeats:
        return _iteration(program, clock, arrival, stalls, record), stalls
    early = program.crossing()
    _issue_early(program, early, clock, arrival)
    for _ in range(_MAX_ITERATIONS):
        before = [*clock.times(), *arrival]
        stalls = []
        seconds = _iteration(program, clock, arrival, stalls, record)
        clock.shift(seconds)
        arrival = [max(0.0, time_s - seconds) for time_s in arrival]
        if _recurs(before, [*clock.times(), *arrival]):
            return seconds, stalls
    return _max_cycle_mean(_iteration_matrix(program, early)), stalls


def _iteration(
    program: EventProgram,
    clock: Clock,
    arrival: list[float],
    stalls: list[tuple[int, float]],
    record: Record | None,
) -> float:
    if record is None:
        return _iterate(program, clock, arrival, stalls)
    record.begin()
    record.seconds = _iterate_sites(program, clock, arrival, stalls, 0.0, record)
    return record.seconds


def running_sums(seconds: Sequence[float]) -> list[float]:
    """Return sums ``s`` such that ops ``i`` to ``j - 1`` take ``s[j] - s[i]``."""
    sums = [0.0]
    for time_s in seconds:
        sums.append(sums[-1] + time_s)
    return sums


def _recurs(before: Iterable[float], after: Iterable[float]) -> bool:
    """Whether two states are the same but for rounding."""
    return all(abs(a - b) <= _TOLERANCE_S for a, b in zip(before, after, strict=True))


def _issue_early(
    program: EventProgram, early: Iterable[int], clock: Clock, arrival: list[float]
) -> None:
    """Issue what the first iteration waits for before it issues it."""
    durations = {
        copy: seconds for kind, copy, seconds in program.events if kind in (PREFETCH, CROSS, PUSH)
    }
    for copy in early:
        source = program.source_of.get(copy)
        ready = arrival[source] if source is not None else 0.0
        begun = clock.issue(program.link_of[copy], durations[copy], program.pipes_of[copy], ready)
        arrival[copy] = begun + durations[copy]


def _iterate(
    program: EventProgram,
    clock: Clock,
    arrival: list[float],
    stalls: list[tuple[int, float]],
    now: float = 0.0,
) -> float:
    """Run one iteration from ``now``, changing ``clock``, ``arrival`` and ``stalls``; return when it ends."""
    waits = 0
    issue, link_of, pipes_of = clock.issue, program.link_of, program.pipes_of
    if program.num_sites > 1:
        return _iterate_sites(program, clock, arrival, stalls, now, None)
    for kind, index, seconds in program.events:
        if kind == COMPUTE:
            now += seconds
        elif kind == WAIT:
            if arrival[index] > now:
                stalls.append((waits, arrival[index] - now))
                now = arrival[index]
            waits += 1
        else:
            ready = now if kind == PREFETCH else max(now, arrival[program.source_of[index]])
            arrival[index] = issue(link_of[index], seconds, pipes_of[index], ready) + seconds
    return now


def _iterate_sites(
    program: EventProgram,
    clock: Clock,
    arrival: list[float],
    stalls: list[tuple[int, float]],
    begun: float,
    record: Record | None,
) -> float:
    """Run one iteration of several sites, as ``_iterate`` does one of one, and write it down if asked to."""
    waits = 0
    now = [begun, *[begun + program.start_s] * (program.num_sites - 1)]
    ended: list[float] = []
    for kind, index, seconds in program.events:
        at_s = from_s = until_s = now[index if kind == ELSEWHERE else 0]
        if record is not None and kind in (PREFETCH, CROSS, PUSH):
            record.take_link(program, clock, index)
        if kind == COMPUTE:
            now[0] = until_s = at_s + seconds
        elif kind == ELSEWHERE:
            now[index] = until_s = at_s + seconds
            ended.append(until_s)
        elif kind == FOLLOW:
            now[0] = max(now[0], ended[index])
        elif kind == MEET:
            now[int(seconds)] = max(now[int(seconds)], arrival[index])
        elif kind in (PREFETCH, PUSH):
            link, pipes = program.link_of[index], program.pipes_of[index]
            ready_s = at_s if kind == PREFETCH else max(at_s, arrival[program.source_of[index]])
            from_s = clock.issue(link, seconds, pipes, ready_s)
            arrival[index] = until_s = from_s + seconds
        elif kind == CROSS:
            partner = program.site_of[index]
            now[max(0, -partner)] += program.give_s[index]
            at_s = now[0] if partner > 0 else max(at_s, now[-partner])
            from_s = clock.issue_ahead(program.link_of[index], seconds, at_s)
            arrival[index] = until_s = from_s + seconds + program.wake_s
        else:
            until_s = arrival[index]
            if until_s > at_s:
                stalls.append((waits, until_s - at_s))
                now[0] = until_s
            if kind == ARRIVE and (partner := program.site_of[index]) > 0:
                now[partner] = max(now[partner], until_s)
            waits += 1
        if record is not None:
            record.events.append(EventTimes(at_s, from_s, until_s, max(now)))
    return max(now)


def _iteration_matrix(program: EventProgram, early: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the max-plus matrix that takes the state before an iteration to the one after it.

    The state is the thread's time, the links' and the pipes' free times, and the arrivals of the
    copies that cross the end of the iteration. A column is what an iteration makes of one of them alone.
    """
    first_pipe = 1 + program.num_links
    first_copy = first_pipe + program.num_pipes
    size = first_copy + len(early)
    columns: list[list[float]] = []
    for number in range(size):
        state = [-math.inf] * size
        state[number] = 0.0
        clock = Clock(state[1:first_pipe], state[first_pipe:first_copy])
        arrival = [-math.inf] * len(program.link_of)
        for copy, time_s in zip(early, state[first_copy:], strict=True):
            arrival[copy] = time_s
        now = _iterate(program, clock, arrival, [], state[0])
        columns.append([now, *clock.times(), *(arrival[copy] for copy in early)])
    return np.array(columns).T


def _max_cycle_mean(matrix: npt.NDArray[np.float64]) -> float:
    """Return the largest mean weight of a cycle; entry ``[i, j]`` is the edge from j to i.

    Karp's theorem with walks that start at every node, so that all components are seen.
    """
    size = matrix.shape[0]
    walks = [np.zeros(size)]
    for _ in range(size):
        walks.append(np.max(matrix + walks[-1][np.newaxis, :], axis=1))
    best = 0.0
    for node in range(size):
        last = walks[size][node]
        if math.isfinite(last):
            means = [
                float(last - walks[k][node]) / (size - k)
                for k in range(size)
                if math.isfinite(walks[k][node])
            ]
            best = max(best, min(means))
    return best
