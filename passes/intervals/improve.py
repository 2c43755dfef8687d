"""Improve: changes to a schedule where its replay stalls, and of few tensors wherever they may be.

Of many tensors one change at a time is tried, near a stall. Few can be searched with all their freedom: several
changes at once, recomputations that come and go, and moves in another order; what is no slower is taken to go on from.
"""

from __future__ import annotations

import math
import random

from gascompile.passes.intervals.decisions import IN_ORDER, Order
from gascompile.passes.intervals.recompute_moves import recompute_moves
from gascompile.passes.intervals.search import FEW_TENSORS, PER_SCHEDULE, ScheduledSelection, Search
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.model.interval_layout import RunLayout

_RECOMPUTED = 0.3
"""How often a change takes up or gives up a recomputation, where it may."""
_RESTED = 0.5
"""How often a change of a list that runs once also lets clean tensors rest in memory around its ends."""
_REORDERED = 0.2
"""How often a change of few tensors also changes the order of moves."""
_EXTRA = 0.3
"""How often a change lets one leave that need not."""
_NEAR = 3
"""Runs that are near any other in a short list."""
_AT_ONCE = (1, 1, 1, 2, 3)
"""Of few tensors, how many changes are made before a schedule is; one is drawn."""


def improve(
    search: Search,
    start: ScheduledSelection,
    chance: random.Random,
    *,
    patience: int,
    share: float = 1.0,
) -> None:
    """Change a schedule where it stalls, for a share of the work left, until so many changes in a row were in vain.

    Args:
        search: takes the schedules.
        start: what to change.
        chance: what is drawn from.
        patience: changes in a row that may be in vain.
        share: of the work that is left, after which to stop.
    """
    few = len(search.task.names) <= FEW_TENSORS
    best, fruitless, begun = start, 0, search.work
    while fruitless < patience and not search.over(begun, share):
        fruitless += 1
        selection = (
            _changed_much(search, best, chance) if few else _changed(best.selection, best, chance)
        )
        if selection is None:
            continue
        # Of few tensors it matters most whether moves are made at once or when their time has come.
        lead_s = chance.choice((best.lead_s, None, 0.0)) if few else best.lead_s
        order = _reordered(best.order, chance) if few else best.order
        changed = search.try_once(best.strategy, selection, lead_s, order)
        if changed is not None and changed.seconds < best.seconds:
            best, fruitless = changed, 0
        elif few and changed is not None and changed.seconds <= best.seconds:
            best = changed


def _reordered(order: Order, chance: random.Random) -> Order:
    eager = chance.choice((0.0, IN_ORDER.eager, math.inf)) if chance.random() < _REORDERED else None
    return Order(
        eager=order.eager if eager is None else eager,
        loads_first=order.loads_first ^ (chance.random() < _REORDERED),
        last_first=order.last_first ^ (chance.random() < _REORDERED),
    )


def _moved_to(plan: RunLayout, old: Selection, chance: random.Random) -> Selection:
    """Return the same for another layout: more leaves where memory is short, less where it is not."""
    selection, keyed = Selection(plan), old.keyed()
    selection.evict_unused()
    order = list(range(len(plan.intervals)))
    chance.shuffle(order)
    for j in order:
        if plan.keys[j] in keyed:
            selection.add(j, keyed[plan.keys[j]])
    selection.fill((j, None) for j in order)
    selection.thin(order)
    return selection


def _changed_much(
    search: Search, before: ScheduledSelection, chance: random.Random
) -> Selection | None:
    """Return the selection with some things changed, recomputations among them."""
    selection, changed = before.selection, False
    for _ in range(chance.choice(_AT_ONCE)):
        if search.task.recompute and chance.random() < _RECOMPUTED:
            search.work += PER_SCHEDULE
            plan = recompute_moves(selection.plan, chance)
            other = _moved_to(plan, selection, chance) if plan is not None else None
        else:
            other = _changed(selection, before, chance)
        if other is not None:
            selection, changed = other, True
    return selection if changed else None


def _changed(
    before: Selection, scheduled: ScheduledSelection, chance: random.Random
) -> Selection | None:
    """Return a selection with one thing changed at a place where the schedule of one like it stalls."""
    selection = before.copy()
    plan = selection.plan
    # Of many intervals one more that leaves in vain is seldom a way to anything.
    if len(plan.task.names) <= FEW_TENSORS and chance.random() < _EXTRA:
        staying = [k for k in range(len(plan.intervals)) if k not in selection.routes]
        return selection if staying and selection.add(chance.choice(staying)) else None
    if not scheduled.stalls or plan is not scheduled.selection.plan:
        return None
    stalls = sorted(scheduled.stalls, key=lambda stall: -stall[1])[:40]
    j, _ = chance.choices(stalls, weights=[time_s for _, time_s in stalls])[0]
    at = plan.intervals[j].end
    routes = plan.task.routes
    near = [
        k
        for k in selection.routes
        if not plan.intervals[k].unused
        and abs(plan.intervals[k].end - at) < max(_NEAR, plan.num_runs // 8)
    ]
    what = chance.randrange(3)
    picked = [j, *chance.sample(near, min(len(near), chance.choice((0, 1, 2, 4))))]
    for k in picked:
        if k not in selection.routes:
            continue
        route = selection.routes[k]
        if not selection.take_back(k):
            continue
        if what == 0 and len(routes) > 1:
            selection.add(k, chance.choice([r for r in range(len(routes)) if r != route]))
    if not selection.fits:
        rest = [
            k for k in range(len(plan.intervals)) if k not in selection.routes and k not in picked
        ]
        chance.shuffle(rest)
        rest.sort(key=lambda k: -plan.idle_s[k] * chance.uniform(0.7, 1.3))
        selection.fill((k, None) for k in rest)
        selection.fill((k, None) for k in picked)
    if not plan.task.workload.repeats and chance.random() < _RESTED:
        selection = selection.with_clean_resident()
    return selection
