"""Seeds: the candidates that a search begins with.

Heuristics of other systems, two of them with what is cheap recomputed, and for tight memory odd ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gascompile.passes.intervals.recompute import IntervalRecompute
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.intervals.strategies import STRATEGIES, largest_area
from gascompile.passes.model.interval_layout import RunLayout, layout

Seed = tuple[str, Selection]
"""A candidate's name and what leaves."""
RECOMPUTE_RATIOS = (0.02, 0.1, 0.4, 1.0)
"""Recompute what takes at most this share of the time that moving it away and back would take."""
_BESIDE = (1, 2)
"""So many of the largest tensors that leave find room beside what a strategy keeps.

What comes back has to have room while what is at hand is in use: without, the link waits at each use of a large tensor.
"""
_FEW_RECOMPUTES = 12
"""As many recomputations are begun with one by one."""
_ATTEMPTS = 40
"""Selections that are tried before a budget is refused."""


def seeds(base: RunLayout, recomputes: Mapping[int, IntervalRecompute]) -> Iterator[Seed]:
    """Yield the heuristics, and two of them with what is cheap to recompute recomputed."""
    for name, strategy in STRATEGIES.items():
        selection = strategy(base)
        yield name, selection
        if not base.task.workload.repeats:
            yield name, selection.with_clean_resident()
    for ratio in RECOMPUTE_RATIOS if recomputes else ():
        dropped = cheap(base, recomputes, ratio)
        if dropped:
            plan = layout(base.task, dropped)
            for name in ("furthest_use", "keep_everything"):
                yield f"{name}_recompute", STRATEGIES[name](plan)
    for recompute in recomputes.values() if len(recomputes) <= _FEW_RECOMPUTES else ():
        plan = layout(base.task, recompute.dropped)
        for name, strategy in STRATEGIES.items():
            yield f"{name}_recompute", strategy(plan)


def roomy(base: RunLayout) -> Iterator[Seed]:
    """Yield heuristics that leave room beside what is in use, so that the next large tensor comes back meanwhile."""
    task = base.task
    able = [i.tensor for i in base.intervals if not (i.unused or i.tensor in task.fixed)]
    most = max((task.sizes[tensor] for tensor in able), default=0)
    for count in _BESIDE:
        limit_bytes = task.limit_bytes - count * most
        tight = replace(base, task=replace(task, limit_bytes=limit_bytes))
        for name, strategy in (("largest_area", largest_area), ("largest_first", _largest_first)):
            selection = strategy(tight)
            if selection.routes:
                yield name, selection.within(base)


def _largest_first(plan: RunLayout) -> Selection:
    """Send away the largest over the fastest link, of those of a size that lie long evenly spread ones first."""
    selection = Selection(plan)
    selection.evict_unused()
    alike: dict[int, list[int]] = {}
    for j, interval in enumerate(plan.intervals):
        alike.setdefault(plan.task.sizes[interval.tensor], []).append(j)
    order: list[int] = []
    for size in sorted(alike, reverse=True):
        most_s = max(plan.idle_s[j] for j in alike[size])
        long = [j for j in alike[size] if plan.idle_s[j] >= most_s / 2]
        order += [long[k] for k in _spread(len(long))]
    selection.fill((j, 0) for j in order)
    selection.fill(
        (j, 0) for j in sorted(range(len(plan.intervals)), key=lambda j: -plan.idle_s[j])
    )
    return _exchanged(selection)


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` so that any first ones lie evenly: by their bits from the lowest on."""
    bits = max(count - 1, 0).bit_length()
    turned = (int(f"{k:0{bits or 1}b}"[::-1], 2) for k in range(1 << bits))
    return [k for k in turned if k < count]


def _exchanged(selection: Selection) -> Selection:
    """Return the selection with small intervals in the place of a large one, where that frees enough."""
    sizes = [selection.task.sizes[interval.tensor] for interval in selection.plan.intervals]
    spare = -selection.excess_bytes
    last = next((j for j in reversed(selection.routes) if sizes[j] > spare > 0), None)
    other = selection.copy()
    if last is None or selection.plan.intervals[last].unused or not other.take_back(last):
        return selection
    small = [j for j in range(len(sizes)) if j not in other.routes and sizes[j] < sizes[last]]
    small.sort(key=lambda j: sizes[j])
    moved = 0
    while small and (excess := other.excess_bytes) > 0:
        j = next((j for j in small if sizes[j] >= excess), small[-1])
        small.remove(j)
        moved += sizes[j] if other.add(j) else 0
    return other if other.fits and moved < sizes[last] else selection


def cheap(
    base: RunLayout, recomputes: Mapping[int, IntervalRecompute], ratio: float
) -> frozenset[tuple[int, int]]:
    """Return what takes at most ``ratio`` of the time of the fastest way out and back."""
    task = base.task
    groups: dict[int, list[int]] = {}
    for j in recomputes:
        groups.setdefault(task.repeatable[base.intervals[j].tensor], []).append(j)
    dropped: set[tuple[int, int]] = set()
    for members in groups.values():
        moved_s = sum(way_s(base, j) for j in members)
        again_s = sum(
            task.op_times_s[op] for op in set().union(*(recomputes[j].ops for j in members))
        )
        idle_s = min(
            float(base.clock[base.intervals[j].end] - base.clock[base.intervals[j].start + 1])
            for j in members
        )
        if again_s <= ratio * moved_s and again_s < idle_s:
            dropped |= {pair for j in members for pair in recomputes[j].dropped}
    return frozenset(dropped)


def way_s(base: RunLayout, j: int) -> float:
    """Return the seconds of the fastest way out and back; a place that is read from only is none."""
    task, tensor = base.task, base.intervals[j].tensor
    return min(
        (
            task.load_s(tensor, route) + task.store_s(tensor, route)
            for route, way in enumerate(task.routes)
            if way.link_out is not None and (tensor in task.fixed or task.can_take(tensor, route))
        ),
        default=math.inf,
    )


def last_resorts(base: RunLayout, recomputes: Mapping[int, IntervalRecompute]) -> Iterator[Seed]:
    """Yield selections for tight memory: all heuristics with everything recomputed, odd orders."""
    everything = frozenset(pair for recompute in recomputes.values() for pair in recompute.dropped)
    chance = random.Random(0)
    for attempt in range(_ATTEMPTS):
        dropped = everything
        if attempt:
            chosen = [recompute for recompute in recomputes.values() if chance.random() < 0.5]
            dropped = frozenset(pair for recompute in chosen for pair in recompute.dropped)
        plan = layout(base.task, dropped)
        if not attempt:
            for name, strategy in STRATEGIES.items():
                yield name, strategy(plan)
        selection = Selection(plan)
        order = sorted(
            range(len(plan.intervals)),
            key=lambda j: (not base.task.persistent[plan.intervals[j].tensor], chance.random()),
        )
        selection.fill((j, None) for j in order)
        yield "all_moved", selection
