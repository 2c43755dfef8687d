"""Interval queues: how long copies may queue for their links so that reserved schedules are fastest."""

from __future__ import annotations

from gascompile.passes.intervals.route_balance import route_balance
from gascompile.passes.intervals.search import Search
from gascompile.passes.intervals.selection import Selection

_STARTS = ((0.5, 0.1, 0.1), (0.5, 0.15, 0.2), (0.5, 0.5, 0.2), (0.15, 0.15, 0.05))
"""Waits out and in and the lead of copies back, in units of the time that the slowest link fills memory in."""
_FACTORS = (0.5, 2.0, 0.8, 1.25)
"""By which each of the three is tried, coarse before fine. Chosen by hand, not measured."""

Waits = tuple[float, float, float]


def queueing(
    search: Search,
    strategy: str,
    selection: Selection,
    *,
    share: float,
) -> None:
    """Consider ``selection`` with reservations: on the routes that it has, and balanced with many waits.

    Args:
        search: takes the schedules.
        strategy: the name that they carry.
        selection: the intervals that leave.
        share: of the work that is left, after which to stop.
    """
    task = search.task
    if not selection.routes:
        return
    unit_s = task.fill_s
    tried: dict[Waits, float] = {}
    known: dict[tuple[frozenset[tuple[int, int]], float], float] = {}
    """Seconds by routes and lead: many waits come to the same."""

    def seconds(waits: Waits) -> float:
        if waits not in tried:
            out_s, in_s, lead_s = (wait * unit_s for wait in waits)
            balanced = route_balance(selection, out_s=out_s, in_s=in_s)
            made = frozenset(balanced.routes.items()), lead_s
            if made not in known:
                scheduled = search.consider(strategy, balanced, lead_s=lead_s)
                known[made] = scheduled.seconds if scheduled is not None else float("inf")
            tried[waits] = known[made]
        return tried[waits]

    begun = search.work

    def over() -> bool:
        return search.over(begun, share)

    search.consider(strategy, selection, lead_s=_STARTS[0][2] * unit_s)
    if len(task.routes) == 1:
        return
    for start in _STARTS:
        if over():
            return
        seconds(start)
    best = min(tried, key=lambda waits: tried[waits])
    while not over():
        before = best
        for waits in _neighbours(best):
            if over() or seconds(waits) < seconds(best):
                best = min(tried, key=lambda waits: tried[waits])
                break
        if best == before:
            return


def _neighbours(waits: Waits) -> list[Waits]:
    out, back, lead = waits
    return [
        changed
        for factor in _FACTORS
        for changed in (
            (out * factor, back, lead),
            (out, back * factor, lead),
            (out, back, lead * factor),
        )
    ]
