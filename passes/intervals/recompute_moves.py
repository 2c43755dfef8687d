"""Recomputation moves: layouts with one recomputation more, one fewer, or one at another place, as steps of a search.

A recomputation may stand before any op up to the use of its results, and more than once: where room for it is, and
where what it reads is there. What it reads that is dead by then lives on for it, or is made anew as well.
"""

from __future__ import annotations

import random

from gascompile.passes.intervals.recompute import may_run_again
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.intervals.strategies import all_moved
from gascompile.passes.model.interval_layout import Run, RunLayout, layout_of

_FEWER, _ELSEWHERE = 0.3, 0.5
"""Up to which draw a change takes a recomputation back, or puts it before another op; beyond that it adds one."""
_EARLY = 0.4
"""How often a recomputation stands before an earlier op than the one that needs it."""
_INPUTS = 0.5
"""How often a dead input of a recomputation is made anew beside it."""


def recompute_moves(plan: RunLayout, chance: random.Random) -> RunLayout | None:
    """Return ``plan`` with one recomputation changed, ``None`` where the draw allows nothing."""
    again = [run for run in plan.runs if run.again]
    draw = chance.random()
    if again and draw < _ELSEWHERE:
        old = chance.choice(again)
        rest = [run for run in plan.runs if run != old]
        if draw >= _FEWER:
            place = chance.randint(old.source + 1, len(plan.task.reads))
            if place == len(plan.task.reads) or not may_run_again(plan.task, old.source, place):
                return None
            rest = _with(rest, Run(place, old.source))
        return layout_of(plan.task, rest)
    return _with_one_more(plan, chance)


def least_excess(base: RunLayout, chance: random.Random, attempts: int) -> Selection:
    """Return what leaves, beside which recomputations, where all that may leave does: as near the limit as can be.

    Args:
        base: what to begin with.
        chance: what is drawn from.
        attempts: changes to try.
    """
    best = all_moved(base)
    for _ in range(attempts):
        if best.fits:
            break
        plan = recompute_moves(best.plan, chance)
        if plan is not None:
            moved = all_moved(plan)
            if moved.excess_bytes <= best.excess_bytes:
                best = moved
    return best


def _with_one_more(plan: RunLayout, chance: random.Random) -> RunLayout | None:
    task = plan.task
    passing = [i for i in plan.intervals if not task.persistent[i.tensor] and i.version[1] >= 0]
    if not passing:
        return None
    interval = chance.choice(passing)
    source = plan.runs[interval.version[1]].source
    place = plan.runs[interval.end].op
    if chance.random() < _EARLY:
        place = chance.randint(min(plan.runs[interval.start].op + 1, place), place)
    runs = list(plan.runs)
    pending, added = [source], False
    while pending:
        source = pending.pop()
        recomputation = Run(place, source)
        if recomputation in runs or not may_run_again(task, source, place):
            continue
        added = True
        runs = _with(runs, recomputation)
        for tensor in task.reads[source]:
            dead = not task.persistent[tensor] and _last_op(plan, tensor) < place
            writers = [op for op in task.writers.get(tensor, ()) if op < place]
            if dead and writers and chance.random() < _INPUTS:
                pending.append(writers[-1])
    return layout_of(task, runs) if added else None


def _last_op(plan: RunLayout, tensor: int) -> int:
    return plan.runs[plan.last_access[tensor]].op


def _with(runs: list[Run], recomputation: Run) -> list[Run]:
    """Return the runs with one more, behind those before the same op whose results it may need."""
    at = next(
        k
        for k, run in enumerate(runs)
        if run.op > recomputation.op
        or (run.op == recomputation.op and run.source >= recomputation.source)
    )
    return [*runs[:at], recomputation, *runs[at:]]
