"""Needed steps: what is left of a list of steps when moves that serve nothing are taken out."""

from __future__ import annotations

from gascompile.core.steps import Compute, Offload, Recompute, Reload, Step, Wait
from gascompile.passes.model.interval_problem import IntervalProblem


def needed_steps(task: IntervalProblem, steps: list[Step]) -> tuple[Step, ...]:
    """Return the steps without moves of tensors that free themselves, and copies that nothing fetches."""
    passing = {name for x, name in enumerate(task.names) if not task.persistent[x]}
    outputs = {name for x, name in enumerate(task.names) if task.stays_to_end[x]}
    ahead: dict[str, bool] = {}
    fetched: set[str] = set()
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Compute | Recompute):
            spec = task.workload.ops[step.op if isinstance(step, Compute) else step.source]
            ahead |= dict.fromkeys((*spec.reads, *spec.writes), True)
            kept.append(step)
            continue
        name = step.tensor
        if name in passing and not ahead.get(name) and name not in outputs:
            continue
        if isinstance(step, Reload):
            fetched.add(name)
        elif isinstance(step, Offload) and name in passing and name not in fetched:
            index = max(
                i for i, at in enumerate(kept) if isinstance(at, Wait) and at.tensor == name
            )
            del kept[index]
            continue
        kept.append(step)
    return tuple(reversed(kept))
