"""Decisions: what becomes of each interval, the moves that make it so, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gascompile.passes.model.interval_layout import RunLayout


class Kind(IntEnum):
    """What a move does; the order is that of the moves at one boundary."""

    RELEASE = 0
    """Wait for a copy out, then release."""
    DROP = 1
    """Release what has a copy already."""
    STORE = 2
    LOAD = 3
    STORED = 4
    """Wait for a copy out whose tensor stays."""
    ARRIVE = 5


ISSUED = (int(Kind.STORE), int(Kind.LOAD))
"""What puts bytes on a link; as numbers, since looking up members of an enumeration takes long."""
Move = tuple[int, int]
"""``(kind, interval)``."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What becomes of each interval of a layout."""

    route: tuple[int | None, ...]
    """Per interval the route it leaves by, ``None`` where it stays."""
    stored: frozenset[int]
    """Intervals whose tensor has to be written out; the other ones that leave have a copy."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order moves are made where a schedule could have them either way."""

    eager: float = 4.0
    """A tensor that is read on is written out at once where the reading ends within so many transfer times.

    Infinite, also before the end of the list where the next one lets it go.
    """
    loads_first: bool = False
    """Whether copies back are issued before the copies out of the same boundary."""
    last_first: bool = False
    """Whether of copies back for the same run those of later intervals go first."""


IN_ORDER = Order()


@dataclass(slots=True)
class MoveList:
    """Moves in program order, and where the planner may do better."""

    layout: RunLayout
    decisions: Decisions
    boundaries: list[list[Move]]
    memory: npt.NDArray[np.int64]
    clock: npt.NDArray[np.float64]
    """Start of each run as simulated from a standing start."""
    carried: dict[int, float]
    """Loads that cross the end, with their arrival after it."""
    gone: dict[int, tuple[int, int]]
    """Boundaries of release and reload per interval that left."""
    idle: set[int] = field(default_factory=set)
    """Intervals that left for no run at all."""
    ahead: frozenset[int] = frozenset()
    """Intervals whose tensor is written out in the iteration before."""

    @property
    def num_moves(self) -> int:
        """How many moves there are."""
        return sum(map(len, self.boundaries))

    @property
    def moved_bytes(self) -> int:
        """Bytes that all moves of an iteration carry."""
        plan = self.layout
        return sum(
            plan.task.sizes[plan.intervals[number].tensor]
            for boundary in self.boundaries
            for kind, number in boundary
            if kind in ISSUED
        )


def decisions(plan: RunLayout, routes: Mapping[int, int]) -> Decisions:
    """Complete the routes of the intervals that leave: which of them have to be written out."""
    task = plan.task
    stored: set[int] = set()
    versions: dict[tuple[int, int], list[int]] = {}
    homes: dict[int, int] = {}
    for number in routes:
        interval = plan.intervals[number]
        versions.setdefault(interval.version, []).append(number)
        if interval.wraps or interval.unused:
            homes[interval.tensor] = routes[number]
    for (tensor, run), members in versions.items():
        clean = task.persistent[tensor] and not task.written[tensor]
        if clean and (task.workload.repeats or tensor in homes):
            continue
        copies: set[int] = set()
        if run < 0 and tensor in homes and not task.workload.repeats:
            copies.add(homes[tensor])
        for number in sorted(members, key=lambda j: plan.intervals[j].age):
            if task.persistent[tensor] and run > plan.intervals[number].start:
                # The first iteration finds a copy where the tensor rests around the end, and no other.
                copies &= {homes[tensor]} if tensor in homes else set()
            if routes[number] not in copies:
                stored.add(number)
                copies.add(routes[number])
    route = tuple(routes.get(j) for j in range(len(plan.intervals)))
    return Decisions(route, frozenset(stored))


def base_memory(plan: RunLayout, chosen: Decisions) -> npt.NDArray[np.int64]:
    """Return the bytes at each run if all that leaves is away during its whole interval."""
    change = np.zeros(plan.num_runs + 1, dtype=np.int64)
    for number, route in enumerate(chosen.route):
        if route is not None:
            interval = plan.intervals[number]
            for start, end in plan.spans(interval):
                change[start] -= plan.task.sizes[interval.tensor]
                change[end] += plan.task.sizes[interval.tensor]
    return plan.kept + np.cumsum(change)[: plan.num_runs]
