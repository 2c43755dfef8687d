"""Recompute search: how much to recompute, when the duals of a program say in which order it pays.

Shadow prices of memory in the relaxation rank recomputations by what their room saves for their time. The more of the
ranking is run again, the less has to move: compute grows and stalls shrink, so the least time of an
iteration is searched over the seconds that recomputations take. All of one place in the list form a segment,
whose results stand side by side until each has had its last use; where that needs too much room, what
crosses one of a number of evenly spaced boundaries is kept or moved instead.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gascompile.passes.intervals.recompute import IntervalRecompute
from gascompile.passes.intervals.route_balance import route_balance
from gascompile.passes.intervals.search import Search
from gascompile.passes.intervals.strategies import furthest_use
from gascompile.passes.model.interval_layout import layout
from gascompile.passes.model.interval_problem import IntervalProblem

_WAITS = ((0.2, 1.0, 0.1), (0.02, 0.5, 0.1))
"""Waits out and in and leads, in units of the time that the slowest link fills memory in."""
_SEGMENTS = (0, 8, 32, 128)
"""Into how many parts of the same bytes the list is cut; 0 leaves it whole."""
_CLOSE = 0.01
"""Steps of this share of the seconds end the search."""


@dataclass(frozen=True, slots=True)
class _Group:
    """What one recomputation makes anew."""

    members: tuple[int, ...]
    """Intervals that it bridges."""
    again_s: float
    ratio: float
    """Seconds that its room is worth by the seconds that it takes."""


def recompute_search(
    search: Search,
    recomputes: Mapping[int, IntervalRecompute],
    prices_s: Mapping[int, float],
    *,
    share: float,
) -> None:
    """Consider more and less recomputation, in the order of what its room is worth.

    Args:
        search: takes the schedules.
        recomputes: how intervals can be bridged.
        prices_s: seconds that the room of each such interval saves, by the duals of a program.
        share: of the work that is left, after which to stop.
    """
    groups = _ranked(search, recomputes, prices_s)
    if not groups:
        return
    sums = [0.0]
    for group in groups:
        sums.append(sums[-1] + group.again_s)
    relaxed_s = max(sums[sum(group.ratio >= 1 for group in groups)], sums[-1] / 100)

    begun = search.work

    def over() -> bool:
        return search.over(begun, share)

    best: tuple[float, float, int] | None = None
    known: dict[Hashable, float] = {}
    for segments in _SEGMENTS:

        def seconds(again_s: float, segments: int = segments) -> float:
            count = bisect_right(sums, again_s) - 1
            if (count, segments) not in known:
                made_s = _consider(search, recomputes, groups[:count], segments, known)
                known[count, segments] = made_s
            return known[count, segments]

        start = best[1] if best is not None else relaxed_s
        fastest = _least(seconds, start, relaxed_s, over)
        if fastest is not None and (best is None or fastest < best[:2]):
            best = (*fastest, segments)
        elif best is not None:
            return
        if over():
            return


def _ranked(
    search: Search, recomputes: Mapping[int, IntervalRecompute], prices_s: Mapping[int, float]
) -> list[_Group]:
    """Return what recomputations can make anew, best first; of each tensor the interval that is worth most."""
    base, task = search.base, search.task
    best: dict[int, int] = {}
    for j in recomputes:
        tensor, price_s = base.intervals[j].tensor, prices_s.get(j, 0.0)
        if price_s > 0 and (tensor not in best or price_s > prices_s[best[tensor]]):
            best[tensor] = j
    members: dict[int, list[int]] = {}
    for tensor, j in best.items():
        members.setdefault(task.repeatable[tensor], []).append(j)
    groups: list[_Group] = []
    for intervals in members.values():
        ops = frozenset[int]().union(*(recomputes[j].ops for j in intervals))
        again_s = sum(task.op_times_s[op] for op in ops)
        price_s = sum(prices_s[j] for j in intervals)
        groups.append(_Group(tuple(intervals), again_s, price_s / again_s if again_s else math.inf))
    return sorted(groups, key=lambda group: -group.ratio)


def _least(
    seconds: Callable[[float], float], start_s: float, unit_s: float, over: Callable[[], bool]
) -> tuple[float, float] | None:
    """Return the least seconds found, and for which argument: walk from the start, then by halves."""
    best: tuple[float, float] | None = None
    step = unit_s / 4
    at = start_s
    tried: dict[float, float] = {}

    def value(argument: float) -> float:
        if argument not in tried:
            tried[argument] = seconds(argument)
        return tried[argument]

    while not over():
        here = value(at)
        best = min(((s, a) for a, s in tried.items()), default=None)
        if over():
            break
        higher = value(at + step)
        if higher < here:
            at, step = at + step, step * 1.6
            continue
        if over():
            break
        lower = value(max(0.0, at - step))
        if lower < here:
            at = max(0.0, at - step)
            continue
        if step < _CLOSE * unit_s:
            break
        step /= 2.5
    return min(((s, a) for a, s in tried.items()), default=best)


def _consider(
    search: Search,
    recomputes: Mapping[int, IntervalRecompute],
    groups: Sequence[_Group],
    segments: int,
    known: dict[Hashable, float],
) -> float:
    """Return the least seconds of schedules that run ``groups`` again.

    Args:
        segments: see ``_SEGMENTS``.
        known: seconds by runs, routes and lead, which many groups and waits have in common; those of new ones go in.

    The others are those of ``recompute_search``.
    """
    base, task = search.base, search.task
    again = {
        base.intervals[j].tensor: task.repeatable[base.intervals[j].tensor]
        for g in groups
        for j in g.members
    }
    crossing = _crossing(task, again, segments)
    dropped = frozenset(
        pair
        for group in groups
        for j in group.members
        if base.intervals[j].tensor not in crossing
        for pair in recomputes[j].dropped
    )
    selection = furthest_use(layout(task, dropped) if dropped else base)
    best_s = math.inf
    # Where there is one route, waits choose none; the leads are the same.
    num_waits = len(_WAITS) if len(task.routes) > 1 else 1
    waits = list(_waits(task.fill_s))[:num_waits] if selection.routes else [(0.0, 0.0, 0.0)]
    for out_s, in_s, lead_s in waits:
        balanced = route_balance(selection, out_s=out_s, in_s=in_s)
        made = selection.plan.runs, frozenset(balanced.routes.items()), lead_s
        if made not in known:
            scheduled = search.consider("swept_recompute", balanced, lead_s=lead_s, rounds=1)
            known[made] = scheduled.seconds if scheduled is not None else math.inf
        best_s = min(best_s, known[made])
        if search.finished or known[made] == math.inf:
            break
    return best_s


def _waits(unit_s: float) -> Iterator[tuple[float, float, float]]:
    for out, back, lead in _WAITS:
        yield out * unit_s, back * unit_s, lead * unit_s


def _crossing(task: IntervalProblem, again: Mapping[int, int], segments: int) -> frozenset[int]:
    """Return what is made anew in one segment and read in a later one.

    Args:
        again: op of each tensor that is made anew.
        segments: parts of the same bytes, in the order of those ops; 0 for none.
    """
    total = sum(task.sizes[tensor] for tensor in again)
    if not segments or not total:
        return frozenset()
    part: dict[int, int] = {}
    reached = 0
    for tensor, op in sorted(again.items(), key=lambda pair: pair[1]):
        part.setdefault(op, reached * segments // (total + 1))
        reached += task.sizes[tensor]
    return frozenset(
        tensor
        for op, number in part.items()
        for tensor in task.reads[op]
        if tensor in again and part[again[tensor]] < number
    )
