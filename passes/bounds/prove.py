"""Prove: a time that no plan within the budget beats."""

from __future__ import annotations

import math
import time

from gascompile.passes.bounds.certify import Proof, problem_limit
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.model.problem import Problem
from gascompile.passes.model.ways import ways_of
from gascompile.passes.search.place import place
from gascompile.passes.search.strategies import MANY_WEIGHTS

_FEW_NODES = 20
"""Branching rarely lifts the bound much above the relaxation's: not many nodes are looked at."""
_QUICK_SOLVED = 200
"""Programs of ``occupancy`` that are solved before there is a plan."""


def prove(
    problem: Problem,
    predicted_s: float,
    *,
    time_limit_s: float,
    mip_gap: float,
    relaxed_s: float = 0.0,
) -> Proof:
    """Return the best bound that the solver finds in ``time_limit_s``, stopping when it is good enough.

    Args:
        predicted_s: time of the plan at hand; a bound within ``mip_gap`` of it needs no improving.
        relaxed_s: the relaxation's bound of direct ways where it is known; it is not solved again.
    """
    deadline_s = time.perf_counter() + time_limit_s
    limit_s, binding = problem_limit(problem)
    bound_s = 0.0
    timed_out = False
    for method in ("occupancy", "relaxed", "integral"):
        left_s = deadline_s - time.perf_counter()
        if predicted_s - max(limit_s, bound_s) <= mip_gap * predicted_s:
            break
        if left_s <= 0:
            timed_out = True
            break
        if method == "occupancy":
            method_bound_s = occupancy(
                problem,
                problem.arena_limit_bytes,
                enough_s=(1 - mip_gap) * predicted_s,
                time_limit_s=left_s,
            )
        elif method == "integral" and len(problem.weights) >= MANY_WEIGHTS:
            break
        else:
            method_bound_s, timed_out = _placed_s(
                problem,
                deadline_s,
                mip_gap,
                relaxed=method == "relaxed",
                relaxed_s=relaxed_s,
            )
        bound_s = max(bound_s, method_bound_s)
    return Proof(limit_s=limit_s, binding=binding, bound_s=bound_s, timed_out=timed_out)


def _placed_s(
    problem: Problem, deadline_s: float, mip_gap: float, *, relaxed: bool, relaxed_s: float
) -> tuple[float, bool]:
    """Return the bound of the program of ``place`` over all sets of ways, and whether the clock ended it."""
    bounds_s: list[float] = []
    for ways in ways_of(problem):
        if relaxed and relaxed_s and not bounds_s:
            bounds_s.append(relaxed_s)
            continue
        placed = place(
            problem,
            problem.arena_limit_bytes,
            time_limit_s=deadline_s - time.perf_counter(),
            mip_gap=mip_gap,
            relaxed=relaxed,
            max_nodes=_FEW_NODES,
            ways=ways,
        )
        bounds_s.append(placed.bound_s)
        if placed.timed_out:
            return 0.0, True
    return min(bounds_s), False


def quick_proof(problem: Problem, *, time_limit_s: float = math.inf) -> Proof:
    """Return what is proven at once, before there is a plan."""
    limit_s, binding = problem_limit(problem)
    bound_s = 0.0
    if problem.arena_limit_bytes >= 0:
        bound_s = occupancy(
            problem,
            problem.arena_limit_bytes,
            enough_s=math.inf,
            time_limit_s=time_limit_s,
            max_solved=_QUICK_SOLVED,
        )
    return Proof(limit_s=limit_s, binding=binding, bound_s=bound_s, timed_out=False)
