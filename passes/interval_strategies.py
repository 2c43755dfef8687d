"""Interval strategies: what known systems do with intervals, as starting points and baselines.

Each one returns the intervals that leave, made to fit. The search never returns anything slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gascompile.passes.interval_layout import Layout
from gascompile.passes.interval_selection import Selection


def keep_everything(plan: Layout) -> Selection:
    """Let nothing leave but what has to: the shortest part of memory above the limit."""
    found = _settled(plan)
    found.fill((j, None) for j in _by_length(plan))
    return found


def all_moved(plan: Layout) -> Selection:
    """Send everything away between its uses, as ZeRO-Inference does with weights."""
    found = _settled(plan)
    for j in range(len(plan.intervals)):
        found.add(j, 0)
    return found


def first_fit(plan: Layout) -> Selection:
    """Keep tensors in the order of their first use until memory is full, as accelerate does."""
    found = all_moved(plan)
    tensors = dict.fromkeys(interval.tensor for interval in plan.intervals)
    for tensor in tensors:
        members = [j for j, interval in enumerate(plan.intervals) if interval.tensor == tensor]
        if all(found.most(j) + plan.task.sizes[tensor] <= plan.task.limit_bytes for j in members):
            found.thin(members)
    return found


def furthest_use(plan: Layout) -> Selection:
    """At each run that does not fit, send away what is used last from there on, as Belady would."""
    found = _settled(plan)
    ends: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_runs + 1)]
    for j, interval in enumerate(plan.intervals):
        for start, end in plan.spans(interval):
            if start < end:
                ahead = interval.end + (plan.num_runs if end != interval.end else 0)
                ends[start].append((ahead, j))
    open_now: list[tuple[int, int]] = []
    for run in range(plan.num_runs):
        open_now += ends[run]
        open_now = sorted(pair for pair in open_now if pair[0] > run)
        while open_now and int(found.memory[run]) > plan.task.limit_bytes:
            found.add(open_now.pop()[1])
    found.fill((j, None) for j in _by_length(plan))
    return found


def per_layer(plan: Layout) -> Selection:
    """Send away the same share of every stretch of the iteration, the least that fits, as FlexGen does."""
    sizes = [plan.task.sizes[interval.tensor] for interval in plan.intervals]
    for step in range(21):
        found, owed = _settled(plan), 0.0
        for j, size in enumerate(sizes):
            owed += size * step / 20
            if owed >= size / 2:
                found.add(j)
                owed -= size
        if found.fits:
            return found
    return all_moved(plan)


def largest_area(plan: Layout) -> Selection:
    """Send away what removes most memory above the limit per time on its link, as G10 does.

    A copy goes to the slowest tier if its way there and back fits into the interval; to the faster
    ones where it does not.
    """
    found = _settled(plan)
    task = plan.task
    limit = task.limit_bytes
    pending = {j: 0.0 for j, interval in enumerate(plan.intervals) if interval.start >= 0}
    while found.excess_bytes > 0 and pending:
        above = np.minimum(np.maximum(found.memory - limit, 0), np.iinfo(np.int32).max * 1024)
        scores: list[tuple[float, int]] = []
        for j in pending:
            interval = plan.intervals[j]
            size = task.sizes[interval.tensor]
            area = sum(
                float(np.dot(np.minimum(above[a:b], size), plan.seconds[a:b]))
                for a, b in plan.spans(interval)
            )
            if area > 0:
                scores.append((area / max(size, 1), j))
        if not scores:
            break
        # Scores change little from one pick to the next: take some of the best ones at once.
        scores.sort(reverse=True)
        for _, j in scores[: max(1, len(scores) // 16)]:
            if found.most(j) > limit:
                found.add(j, _slowest_in_time(found, j))
            del pending[j]
    found.fill((j, None) for j in _by_length(plan))
    return found


def _slowest_in_time(found: Selection, j: int) -> int:
    """Return the slowest route on which interval ``j`` gets away and back, and the links have time left."""
    plan, task = found.plan, found.task
    interval = plan.intervals[j]
    idle_s = sum(float(plan.clock[b] - plan.clock[a]) for a, b in plan.spans(interval))
    for route in reversed(range(len(task.routes))):
        if task.can_take(interval.tensor, route):
            load_s = task.load_s(interval.tensor, route)
            store_s = task.store_s(interval.tensor, route) if task.written[interval.tensor] else 0.0
            busy_s = max(
                pair[0] + pair[1]
                for pair in zip(found.busy_s(route), (load_s, store_s), strict=True)
            )
            if 1.5 * (load_s + store_s) <= idle_s and busy_s <= float(plan.clock[-1]):
                return route
    return 0


def _settled(plan: Layout) -> Selection:
    found = Selection(plan)
    found.settle()
    return found


def _by_length(plan: Layout) -> Iterator[int]:
    """Yield intervals, those that lie unused longest for their bytes first."""
    idle_s = [
        sum(float(plan.clock[b] - plan.clock[a]) for a, b in plan.spans(interval))
        for interval in plan.intervals
    ]
    yield from sorted(range(len(idle_s)), key=lambda j: -idle_s[j])


STRATEGIES: dict[str, Callable[[Layout], Selection]] = {
    "keep_everything": keep_everything,
    "all_moved": all_moved,
    "first_fit": first_fit,
    "largest_area": largest_area,
    "per_layer": per_layer,
    "furthest_use": furthest_use,
}
"""By the name that a plan carries."""
