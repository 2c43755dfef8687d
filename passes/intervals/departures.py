"""Departures: at which boundary each interval that leaves begins, is due, and has its copy out started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.passes.intervals.decisions import Decisions, Order
from gascompile.passes.model.interval_layout import Interval, RunLayout


@dataclass(frozen=True, slots=True)
class Departures:
    """Intervals by boundary."""

    store_at: list[list[int]]
    """Those whose copy out is ready to start, those due first in front."""
    begin_at: list[list[int]]
    due_at: list[list[int]]
    ahead: frozenset[int]
    """Those whose copy out starts in the iteration before, behind the write."""


def departures(
    plan: RunLayout, chosen: Decisions, starts: Sequence[float], order: Order
) -> Departures:
    """Sort the intervals that leave by where their tensor can be written, leaves and is due.

    Args:
        starts: when each run is expected to start, in seconds.
        order: how early copies out start.
    """
    away = {
        interval.tensor
        for interval, route in zip(plan.intervals, chosen.route, strict=True)
        if interval.wraps and route is not None
    }
    first_age: dict[tuple[int, int], int] = {}
    store_at: list[list[int]] = [[] for _ in plan.runs]
    begin_at: list[list[int]] = [[] for _ in plan.runs]
    due_at: list[list[int]] = [[] for _ in plan.runs]
    for number, route in enumerate(chosen.route):
        if route is None or (interval := plan.intervals[number]).unused:
            continue
        first = first_age.setdefault(interval.version, interval.age)
        first_age[interval.version] = min(first, interval.age)
        begin_at[interval.start + 1].append(number)
        due_at[interval.end].append(number)
    ahead: set[int] = set()
    for number in chosen.stored:
        interval, route = plan.intervals[number], chosen.route[number]
        assert route is not None, "only what leaves is written out"
        boundary = interval.start + 1
        if interval.age == first_age[interval.version]:
            rests = interval.tensor not in away
            if rests and _crosses(plan, interval, order):
                ahead.add(number)
                boundary = interval.version[1] + 1
            else:
                most_s = order.eager * plan.task.store_s(interval.tensor, route)
                boundary = _boundary(interval, starts, most_s, rests=rests)
        store_at[boundary].append(number)
    around = plan.num_runs
    for numbers in filter(len, store_at):
        numbers.sort(key=lambda j: (plan.intervals[j].end + around * plan.intervals[j].wraps, j))
    return Departures(store_at, begin_at, due_at, frozenset(ahead))


def _crosses(plan: RunLayout, interval: Interval, order: Order) -> bool:
    """Whether the copy out of what rests in its place starts in the iteration before."""
    task, tensor = plan.task, interval.tensor
    whole = task.changed_bytes[tensor] == task.sizes[tensor]
    carried = interval.version[1] > interval.start and not interval.wraps
    return order.eager == math.inf and task.workload.repeats and carried and whole


def _boundary(interval: Interval, starts: Sequence[float], most_s: float, *, rests: bool) -> int:
    """Return the boundary at which the copy out starts: after the write if the reads end within ``most_s``."""
    written = interval.version[1]
    carried = written > interval.start or written < 0
    if interval.ahead:
        return 0
    if carried and not interval.wraps and rests:
        written = -1
    elif not 0 <= written < interval.start:
        return interval.start + 1
    reading_s = starts[interval.start] - starts[written + 1]
    return written + 1 if reading_s <= most_s else interval.start + 1
