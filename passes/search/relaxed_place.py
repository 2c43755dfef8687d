"""Relaxed place: the linear relaxation of ``place`` with all of the arena, for its bound and its shadow prices."""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.core.errors import SolverError
from gascompile.passes.bounds.shadow_prices import Solution
from gascompile.passes.model.problem import Problem
from gascompile.passes.model.ways import Way
from gascompile.passes.search.place import place


def relaxed_place(
    problem: Problem, time_limit_s: float, ways: Sequence[Way] | None = None
) -> Solution | None:
    """Return the linear relaxation's solution with all of the arena; ``None`` where the solver fails.

    Args:
        problem: what is planned.
        time_limit_s: seconds until it is given up.
        ways: how weights come; directly where none are given.
    """
    arena_bytes = problem.arena_limit_bytes
    try:
        return place(
            problem,
            arena_bytes,
            time_limit_s=time_limit_s,
            mip_gap=0.0,
            relaxed=True,
            ways=ways,
        )
    except SolverError:
        return None
