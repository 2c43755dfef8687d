"""Prove: a time that no plan within the budget beats."""

from __future__ import annotations

from gascompile.passes.certify import Proof, physical_limit
from gascompile.passes.place import place
from gascompile.passes.problem import Problem

_BRANCHING_SHARE = 0.03
"""Branching rarely lifts the bound much above the relaxation's; the time is better spent elsewhere."""


def prove(problem: Problem, predicted_s: float, *, time_limit_s: float, mip_gap: float) -> Proof:
    """Return the best bound that the solver finds in ``time_limit_s``, stopping when it is good enough.

    Args:
        predicted_s: time of the plan at hand; a bound within ``mip_gap`` of it needs no improving.
    """
    limit_s, binding = physical_limit(
        problem.compute_s,
        sum(weight.size_bytes for weight in problem.weights if weight.uses),
        problem.arena_limit_bytes,
        problem.machine,
        problem.room_bytes,
    )
    bound_s = 0.0
    timed_out = False
    seconds = time_limit_s * _BRANCHING_SHARE
    for relaxed in (True, False):
        if predicted_s - max(limit_s, bound_s) <= mip_gap * predicted_s:
            break
        if time_limit_s <= 0:
            timed_out = True
            break
        found = place(
            problem,
            problem.arena_limit_bytes,
            time_limit_s=time_limit_s if relaxed else seconds,
            mip_gap=mip_gap,
            relaxed=relaxed,
        )
        bound_s = max(bound_s, found.bound_s)
        timed_out = found.timed_out
    return Proof(limit_s=limit_s, binding=binding, bound_s=bound_s, timed_out=timed_out)
