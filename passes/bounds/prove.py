"""Prove: a time that no plan within the budget beats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from gascompile.passes.bounds.certify import Proof, problem_limit
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.bounds.shadow_prices import Solution
from gascompile.passes.model.effort import Pivots
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
    pivots: Pivots | None = None,
) -> Proof:
    """Return the best bound that the solver finds in ``time_limit_s``, stopping when it is good enough.

    Args:
        predicted_s: time of the plan at hand; a bound within ``mip_gap`` of it needs no improving.
        relaxed_s: the relaxation's bound of direct ways where it is known; it is not solved again.
        pivots: what the solver may take of all programs, where that is counted.
    """
    deadline_s = time.perf_counter() + time_limit_s
    limit_s, binding = problem_limit(problem)
    bound_s = 0.0
    timed_out = False
    several = len(ways_of(problem)) > 1
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
        elif len(problem.weights) >= MANY_WEIGHTS and (method == "integral" or several):
            # Of ways in two hops it takes as long again, and hardly says more than occupancy.
            break
        else:
            known_s = relaxed_s if method == "relaxed" else 0.0
            solve = partial(
                place,
                mip_gap=mip_gap,
                relaxed=method == "relaxed",
                max_nodes=_FEW_NODES,
                pivots=pivots,
            )
            method_bound_s, timed_out = _placed_s(problem, solve, deadline_s, known_s)
        bound_s = max(bound_s, method_bound_s)
    return Proof(limit_s=limit_s, binding=binding, bound_s=bound_s, timed_out=timed_out)


def _placed_s(
    problem: Problem, solve: Callable[..., Solution], deadline_s: float, known_s: float
) -> tuple[float, bool]:
    """Return the bound of the program of ``place`` over all sets of ways, and whether the clock ended it.

    Args:
        solve: ``place`` with its options.
        known_s: the bound of the first set, all direct, where it is known.
    """
    sets = ways_of(problem)
    bounds_s = [known_s] if known_s else []
    for ways in sets[len(bounds_s) :]:
        left_s = deadline_s - time.perf_counter()
        placed = solve(problem, problem.arena_limit_bytes, time_limit_s=left_s, ways=ways)
        # There is a plan: a solver that finds none has stumbled, as HiGHS does over some programs, and proves nothing.
        bounds_s.append(placed.bound_s if math.isfinite(placed.bound_s) else 0.0)
        if placed.timed_out:
            return min(bounds_s) if len(bounds_s) == len(sets) else 0.0, True
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
