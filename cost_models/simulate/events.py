"""One iteration of a plan as timed events, and how long it takes.

Every time is a longest path: a wait is a maximum, an op or a transfer a sum. An iteration is then a linear
map in max-plus algebra and the steady state of a repeating program is that map's eigenvalue. It is
found by iterating until the state recurs, and by Karp's theorem where that takes long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COMPUTE, PREFETCH, WAIT = 0, 1, 2
_MAX_ITERATIONS = 12
_TOLERANCE_S = 1e-12

Event = tuple[int, int, float]
"""``(COMPUTE, op, seconds) | (PREFETCH, copy, seconds on the link) | (WAIT, copy, 0.0)``."""


@dataclass(frozen=True, slots=True)
class EventProgram:
    """One iteration as events over numbered copies of tensors."""

    events: Sequence[Event]
    link_of: Sequence[int]
    """Link index of each copy."""
    pipes_of: Sequence[tuple[tuple[int, float], ...]]
    """``(pipe index, seconds)`` of each copy: it keeps the pipe from the next transfer for so long."""
    up_front: Sequence[int]
    """Copies that are issued before the first iteration, in the order of their first use."""
    repeats: bool
    num_links: int
    num_pipes: int


@dataclass(slots=True)
class _State:
    """Times relative to the start of an iteration; what lies in the past is 0."""

    link_free: list[float]
    pipe_free: list[float]
    arrival: list[float]

    def shifted(self, seconds: float) -> _State:
        """Return the state as seen from ``seconds`` later."""
        return _State(
            [max(0.0, t - seconds) for t in self.link_free],
            [max(0.0, t - seconds) for t in self.pipe_free],
            [max(0.0, t - seconds) for t in self.arrival],
        )

    def recurs(self, other: _State) -> bool:
        """Whether the two states are the same but for rounding."""
        pairs = zip(
            (*self.link_free, *self.pipe_free, *self.arrival),
            (*other.link_free, *other.pipe_free, *other.arrival),
            strict=True,
        )
        return all(abs(a - b) <= _TOLERANCE_S for a, b in pairs)


def steady_seconds(program: EventProgram) -> float:
    """Return the seconds of one iteration; in the steady state where the program repeats."""
    return steady_iteration(program)[0]


def steady_iteration(program: EventProgram) -> tuple[float, list[tuple[int, float]]]:
    """Return the seconds of the steady iteration and its stalls as ``(number of the wait, seconds)``."""
    state = _initial_state(program)
    stalls: list[tuple[int, float]] = []
    if not program.repeats:
        return _iterate(program, state, stalls), stalls
    for _ in range(_MAX_ITERATIONS):
        before = _State(state.link_free[:], state.pipe_free[:], state.arrival[:])
        stalls = []
        seconds = _iterate(program, state, stalls)
        state = state.shifted(seconds)
        if state.recurs(before):
            return seconds, stalls
    return _max_cycle_mean(_iteration_matrix(program)), stalls


def running_sums(seconds: Sequence[float]) -> list[float]:
    """Return sums ``s`` such that ops ``i`` to ``j - 1`` take ``s[j] - s[i]``."""
    sums = [0.0]
    for time_s in seconds:
        sums.append(sums[-1] + time_s)
    return sums


def _initial_state(program: EventProgram) -> _State:
    state = _State(
        [0.0] * program.num_links, [0.0] * program.num_pipes, [0.0] * len(program.link_of)
    )
    durations = {copy: seconds for kind, copy, seconds in program.events if kind == PREFETCH}
    for copy in program.up_front:
        _enqueue(program, state, copy, durations[copy], 0.0)
    return state


def _enqueue(program: EventProgram, state: _State, copy: int, seconds: float, now: float) -> None:
    link = program.link_of[copy]
    start = max(now, state.link_free[link])
    for pipe, _ in program.pipes_of[copy]:
        start = max(start, state.pipe_free[pipe])
    for pipe, pipe_s in program.pipes_of[copy]:
        state.pipe_free[pipe] = start + pipe_s
    state.arrival[copy] = state.link_free[link] = start + seconds


def _iterate(program: EventProgram, state: _State, stalls: list[tuple[int, float]]) -> float:
    """Run one iteration from time 0, changing ``state`` and ``stalls``; return its seconds."""
    now = 0.0
    waits = 0
    link_free, arrival = state.link_free, state.arrival
    link_of, pipes_of = program.link_of, program.pipes_of
    for kind, index, seconds in program.events:
        if kind == COMPUTE:
            now += seconds
        elif kind == WAIT:
            if arrival[index] > now:
                stalls.append((waits, arrival[index] - now))
                now = arrival[index]
            waits += 1
        elif pipes_of[index]:
            _enqueue(program, state, index, seconds, now)
        else:
            link = link_of[index]
            start = link_free[link]
            arrival[index] = link_free[link] = (start if start > now else now) + seconds
    return now


def _iteration_matrix(program: EventProgram) -> npt.NDArray[np.float64]:
    """Return the max-plus matrix that takes the state before an iteration to the one after it.

    The state is the thread's time, the links' and the pipes' free times, and the arrivals of the
    copies that cross the end of the iteration.
    """
    crossing = list(program.up_front)
    first_pipe = 1 + program.num_links
    first_copy = first_pipe + program.num_pipes
    size = first_copy + len(crossing)
    unit = np.full((size, size), -math.inf)
    np.fill_diagonal(unit, 0.0)
    now = unit[0]
    link_free = [unit[1 + i] for i in range(program.num_links)]
    pipe_free = [unit[first_pipe + i] for i in range(program.num_pipes)]
    arrival = {copy: unit[first_copy + i] for i, copy in enumerate(crossing)}
    for kind, index, seconds in program.events:
        if kind == COMPUTE:
            now = now + seconds
        elif kind == WAIT:
            now = np.maximum(now, arrival[index])
        else:
            link = program.link_of[index]
            start = np.maximum(now, link_free[link])
            for pipe, _ in program.pipes_of[index]:
                start = np.maximum(start, pipe_free[pipe])
            for pipe, pipe_s in program.pipes_of[index]:
                pipe_free[pipe] = start + pipe_s
            arrival[index] = link_free[link] = start + seconds
    return np.stack([now, *link_free, *pipe_free, *(arrival[copy] for copy in crossing)])


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
