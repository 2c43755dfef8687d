"""Initial residency: what a plan's iteration finds where, so that a first one can begin like any other."""

from __future__ import annotations

from collections.abc import Collection

from gascompile.core.crossing import crossing
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Release, Reload, Step, Wait


def initial_residency(
    plan: Plan, persistent: Collection[str]
) -> tuple[frozenset[str], tuple[Offload | Reload, ...]]:
    """Return the tensors that are away before the first step, and moves that the last iteration has started."""
    first: dict[str, Step] = {}
    last: dict[str, Offload | Reload] = {}
    touches: list[tuple[str, bool]] = []
    used: set[str] = set()
    site = plan.machine.compute_tier
    for step in plan.steps:
        if isinstance(step, Compute):
            op = plan.workload.ops[step.op]
            if plan.ops[step.op].site == site:
                used.update((*op.reads, *op.writes))
        elif isinstance(step, (Offload, Reload, Release, Wait)) and step.tensor in persistent:
            if step.tensor not in used:
                first.setdefault(step.tensor, step)
            if isinstance(step, (Offload, Reload)):
                last[step.tensor] = step
                touches.append((step.tensor, True))
            elif isinstance(step, Wait) and step.tensor not in used:
                touches.append((step.tensor, False))
    up_front = tuple(last[name] for name in crossing(touches))
    away = {step.tensor for step in (*first.values(), *up_front) if isinstance(step, Reload)}
    idle = {
        name
        for name, tensor in plan.tensors.items()
        if name in persistent and name not in used and tensor.home != site
    }
    outside = set(persistent) - set(plan.tensors)
    return frozenset(away | idle | outside), up_front
