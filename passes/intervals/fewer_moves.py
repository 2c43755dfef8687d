"""Fewer moves: of plans that take about as long as the fastest one found, one that moves fewer bytes.

In predicted seconds a transfer beside ops is free. In real ones it takes some of the processors, where these move it,
of the memory's bandwidth and of the drive, which transfers that are waited for then lack.
"""

from __future__ import annotations

from collections.abc import Mapping

from gascompile.passes.intervals.recompute import IntervalRecompute
from gascompile.passes.intervals.search import FEW_TENSORS, ScheduledSelection, Search
from gascompile.passes.intervals.seeds import RECOMPUTE_RATIOS, cheap
from gascompile.passes.intervals.strategies import furthest_use
from gascompile.passes.model.interval_layout import layout

_SLOWER = 2e-3
"""Share of the seconds that a plan with fewer moves may take longer: a fifth of the default gap."""
_WORTH = 0.05
"""And no more of the seconds than this share of the bytes that it saves: half a percent fewer are worth no time."""
_PENALTIES = (2.0, 4.0)
"""How many times as far away the next use of what is written out and comes back has to be, for it to leave first.

It moves twice, and what has a copy outside once. [Empirical] Over 22 frozen layers with adapters, with links that are
busy all the time: 2 gave 5 % fewer bytes in the same time, 4 a tenth fewer in 0.8 % more, larger ones no less.
"""


def fewer_moves(
    search: Search, recomputes: Mapping[int, IntervalRecompute], *, is_free: bool
) -> ScheduledSelection:
    """Return the schedule that moves the fewest bytes of those within a margin of the best; of few tensors the best.

    The work of the search is not asked for: a fixed number of schedules is made.

    Args:
        search: with its best schedule.
        recomputes: what may run again.
        is_free: whether moves take nothing from ops, so that fewer of them are worth no time.
    """
    best = search.best
    assert best is not None, "what is not refused has a schedule"
    if len(search.task.names) <= FEW_TENSORS or not best.schedule.moved_bytes:
        return best
    most_s, lean = best.seconds * (1 + (0.0 if is_free else _SLOWER)), best
    least = all_bytes = best.schedule.moved_bytes
    recomputed = (cheap(search.base, recomputes, ratio) for ratio in RECOMPUTE_RATIOS)
    layouts = {best.selection.plan.runs: best.selection.plan, search.base.runs: search.base}
    for dropped in dict.fromkeys(dropped for dropped in recomputed if dropped):
        plan = layout(search.task, dropped)
        layouts.setdefault(plan.runs, plan)
    for plan in layouts.values():
        if float(plan.clock[-1]) > most_s:
            continue
        for penalty in _PENALTIES:
            selection = furthest_use(plan, penalty)
            for lead_s in dict.fromkeys((None, best.lead_s)):
                candidate = search.consider("fewest_moves", selection, lead_s=lead_s, rounds=1)
                if candidate is None:
                    continue
                moved = candidate.schedule.moved_bytes
                share = 0.0 if is_free else min(_SLOWER, _WORTH * (1 - moved / all_bytes))
                if moved < least and candidate.seconds <= best.seconds * (1 + share):
                    lean, least = candidate, moved
    return lean
