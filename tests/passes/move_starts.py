"""Where each tensor may be when the oracle's iteration begins."""

from __future__ import annotations

from tests.passes.move_actions import ABSENT, ARRIVING, LEAVING, NOTHING, PRESENT, Status
from tests.passes.move_problem import MoveProblem, may_vanish


def options_at_home(task: MoveProblem, x: int) -> list[Status]:
    """Return where a tensor may be at the start of a plan that does not repeat."""
    if not task.persistent[x]:
        return [NOTHING]
    found: list[Status] = [(PRESENT, -1, False)]
    for tier in range(len(task.slow)):
        back = task.into[tier] >= 0 and (task.out_of[tier] >= 0 or not task.dirty[x])
        if back:
            found.append((ABSENT, tier, True))
        if task.into[tier] >= 0 and task.out_of[tier] >= 0 and not task.roomy:
            found.append((PRESENT, tier, False))
    return found


def options_behind(task: MoveProblem, cut: int) -> list[list[Status]]:
    """Return per tensor where it may be right behind op ``cut`` of a repeating workload."""
    return [
        _persistent_behind(task, cut, x) if task.persistent[x] else _passing_behind(task, cut, x)
        for x in range(len(task.size))
    ]


def _persistent_behind(task: MoveProblem, cut: int, x: int) -> list[Status]:
    if not any(x in touched for touched in task.touched):
        away: list[Status] = [
            (ABSENT, tier, True) for tier in range(len(task.slow)) if task.into[tier] >= 0
        ]
        return away[:1] if away and task.roomy else [*away, (PRESENT, -1, False)]
    found: list[Status] = []
    for tier in range(len(task.slow)):
        if task.into[tier] < 0 or (task.dirty[x] and task.out_of[tier] < 0):
            continue
        stale: Status = (PRESENT, -1 if task.roomy else tier, False)
        if x in task.writes[cut]:
            found.append(stale)
            continue
        found.append((PRESENT, tier, True))
        if task.dirty[x]:
            found += [stale, (LEAVING, tier, False)]
        if x not in task.touched[cut]:
            found += [(ABSENT, tier, True), (ARRIVING, tier, True)]
    if not found or not task.roomy:
        found.append((PRESENT, -1, False))
    return list(dict.fromkeys(found))


def _passing_behind(task: MoveProblem, cut: int, x: int) -> list[Status]:
    if x not in task.wanted[cut + 1]:
        return [NOTHING]
    rerun = may_vanish(task, cut + 1, x)
    found: list[Status] = [(PRESENT, -1, False)]
    if x not in task.touched[cut] and rerun:
        found.append(NOTHING)
    for tier in range(len(task.slow)):
        if task.into[tier] < 0 or task.out_of[tier] < 0:
            continue
        if not task.roomy:
            found.append((PRESENT, tier, False))
        if x in task.writes[cut]:
            continue
        found += [(PRESENT, tier, True), (LEAVING, tier, False)]
        if x not in task.touched[cut]:
            found += [(ABSENT, tier, True), (ARRIVING, tier, True)]
            if rerun and not task.roomy:
                found.append((ABSENT, tier, False))
    return found
