"""Interval strategies: what known systems do with intervals, as starting points and baselines.

Each one returns the intervals that leave, made to fit. The search never returns anything slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gascompile.passes.intervals.selection import Selection
from gascompile.passes.model import peer_orders
from gascompile.passes.model.interval_layout import RunLayout
from gascompile.passes.search.strategies import evenly

_FRACTIONS = 20
"""Of all bytes that are tried as sent away, stretch by stretch. Chosen, not measured."""
_STRETCHES = 400
"""Into how many parts an iteration is cut to see when a link has time."""


def keep_everything(plan: RunLayout) -> Selection:
    """Let nothing leave but what has to: the shortest part of memory above the limit."""
    selection = _without_unused(plan)
    selection.fill((j, None) for j in _by_length(plan))
    return selection


def all_moved(plan: RunLayout) -> Selection:
    """Send everything away between its uses, as ZeRO-Inference does with weights."""
    selection = _without_unused(plan)
    for j in range(len(plan.intervals)):
        selection.add(j, 0)
    return selection


def first_fit(plan: RunLayout) -> Selection:
    """Keep tensors in the order of their first use until memory is full, as accelerate does."""
    selection = all_moved(plan)
    intervals_of: dict[int, list[int]] = {}
    for j in sorted(range(len(plan.intervals)), key=lambda j: plan.intervals[j].start):
        intervals_of.setdefault(plan.intervals[j].tensor, []).append(j)
    tensors = list(intervals_of)
    first_uses = [plan.intervals[intervals_of[tensor][0]].start for tensor in tensors]
    for tensor in (tensors[place] for place in peer_orders.first_fit(first_uses)):
        members = intervals_of[tensor]
        if all(
            selection.most(j) + plan.task.sizes[tensor] <= plan.task.limit_bytes for j in members
        ):
            selection.thin(members)
    return selection


def furthest_use(plan: RunLayout, dirty_penalty: float | None = None) -> Selection:
    """At each run that does not fit, send away what is used last from there on, as Belady would.

    Args:
        plan: the runs and their intervals.
        dirty_penalty: what has to be written out counts as used so many times sooner; ``None``: as all else does.
    """
    selection = _without_unused(plan)
    begun: list[list[int]] = [[] for _ in range(plan.num_runs + 1)]
    for j, interval in enumerate(plan.intervals):
        for start, end in plan.spans(interval):
            if start < end:
                begun[start].append(j)
    waiting: tuple[list[tuple[int, int]], ...] = ([], [])
    for run in range(plan.num_runs):
        for j in begun[run]:
            heap = waiting[dirty_penalty is not None and _is_dirty(plan, j)]
            heapq.heappush(heap, (-_next_use(plan, j, run), -j))
        while int(selection.memory[run]) > plan.task.limit_bytes:
            clean, dirty = (-heap[0][0] - run if heap else 0 for heap in waiting)
            if max(clean, dirty) <= 0:
                break
            heap = waiting[clean * (dirty_penalty or 1) < dirty]
            selection.add(-heapq.heappop(heap)[1])
    selection.fill((j, None) for j in _by_length(plan))
    return selection


def per_layer(plan: RunLayout) -> Selection:
    """Send away the same share of every stretch of the iteration, the least that fits, as FlexGen does."""
    sizes = [plan.task.sizes[interval.tensor] for interval in plan.intervals]
    for part in range(_FRACTIONS + 1):
        selection = _without_unused(plan)
        for j in evenly(sizes, part, _FRACTIONS, least=0.5):
            selection.add(j)
        if selection.fits:
            return selection
    return all_moved(plan)


def largest_area(plan: RunLayout) -> Selection:
    """Send away what removes most memory above the limit per time on its link, as G10 does.

    A copy goes to the slowest tier if its way there and back fits into the interval; to the faster
    ones where it does not.
    """
    selection = _without_unused(plan)
    task = plan.task
    limit = task.limit_bytes
    channels = _Channels(plan)
    pending = {j: 0.0 for j, interval in enumerate(plan.intervals) if not interval.unused}
    while selection.excess_bytes > 0 and pending:
        above = np.minimum(np.maximum(selection.memory - limit, 0), np.iinfo(np.int32).max * 1024)
        clipped: dict[int, npt.NDArray[np.float64]] = {}
        areas: dict[tuple[int, tuple[tuple[int, int], ...]], float] = {}
        scored: list[int] = []
        scores: list[float] = []
        for j in pending:
            interval = plan.intervals[j]
            size, spans = task.sizes[interval.tensor], plan.spans(interval)
            # A parameter and its moments lie unused together.
            area = areas.get((size, spans))
            if area is None:
                if size not in clipped:
                    clipped[size] = np.minimum(above, size).astype(np.float64)
                over = clipped[size]
                area = sum(float(np.dot(over[a:b], plan.seconds[a:b])) for a, b in spans)
                areas[size, spans] = area
            if area > 0:
                scored.append(j)
                scores.append(area / max(size, 1))
        if not scores:
            break
        # Scores change little from one pick to the next: take some of the best ones at once.
        leaving = peer_orders.largest_area(scores)[::-1]
        for j in (scored[place] for place in leaving[: max(1, len(scores) // 16)]):
            if selection.most(j) > limit:
                selection.add(j, channels.slowest_in_time(j))
            del pending[j]
    selection.fill((j, None) for j in _by_length(plan))
    return selection


class _Channels:
    """Time that is left on each link, in stretches of the iteration."""

    def __init__(self, plan: RunLayout) -> None:
        self.plan = plan
        self.width_s = max(float(plan.clock[-1]), 1e-12) / _STRETCHES
        self.left_s = {
            (route, away): [self.width_s] * _STRETCHES
            for route in range(len(plan.task.routes))
            for away in (True, False)
        }

    def slowest_in_time(self, j: int) -> int:
        """Take time on the slowest route on which ``j`` gets away and back; the fastest if on none."""
        plan, task = self.plan, self.plan.task
        if len(task.routes) == 1:
            return 0
        interval = plan.intervals[j]
        begin_s, end_s = float(plan.clock[interval.start + 1]), float(plan.clock[interval.end])
        begin, end = int(begin_s / self.width_s), int(end_s / self.width_s)
        end += _STRETCHES if interval.wraps else 0
        for route in reversed(range(len(task.routes))):
            if task.can_take(interval.tensor, route):
                written = task.written[interval.tensor]
                store_s = task.store_s(interval.tensor, route) if written else 0.0
                out = self._taken(route, True, range(begin, end), store_s)
                load_s = task.load_s(interval.tensor, route)
                back = self._taken(route, False, range(end - 1, begin - 1, -1), load_s)
                if out is None or back is None:
                    continue
                if max(out, default=begin) <= min(back, default=end):
                    for away, taken in ((True, out), (False, back)):
                        for stretch, seconds in taken.items():
                            self.left_s[route, away][stretch % _STRETCHES] -= seconds
                    return route
        return 0

    def _taken(
        self, route: int, away: bool, stretches: range, needed_s: float
    ) -> dict[int, float] | None:
        """Return the seconds to take of each stretch in turn; ``None`` where they are not enough."""
        taken: dict[int, float] = {}
        for stretch in stretches:
            if needed_s <= 0:
                break
            part = min(needed_s, self.left_s[route, away][stretch % _STRETCHES])
            if part > 0:
                taken[stretch] = part
                needed_s -= part
        return taken if needed_s <= 1e-12 else None


def _next_use(plan: RunLayout, j: int, run: int) -> int:
    """Return the run that needs an interval's tensor next, counted on into the next iteration."""
    interval = plan.intervals[j]
    return interval.end + (plan.num_runs if interval.wraps and run > interval.start else 0)


def _is_dirty(plan: RunLayout, j: int) -> bool:
    """Return whether a tensor has to be written out before it leaves."""
    tensor = plan.intervals[j].tensor
    return not plan.task.persistent[tensor] or plan.task.written[tensor]


def _without_unused(plan: RunLayout) -> Selection:
    selection = Selection(plan)
    selection.evict_unused()
    return selection


def _by_length(plan: RunLayout) -> Iterator[int]:
    """Yield intervals, those that lie unused longest for their bytes first."""
    yield from sorted(range(len(plan.intervals)), key=lambda j: -plan.idle_s[j])


STRATEGIES: dict[str, Callable[[RunLayout], Selection]] = {
    "keep_everything": keep_everything,
    "all_moved": all_moved,
    "first_fit": first_fit,
    "largest_area": largest_area,
    "per_layer": per_layer,
    "furthest_use": furthest_use,
}
"""By the name that a plan carries."""
