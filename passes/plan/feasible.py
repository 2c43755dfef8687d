"""Feasible: the smallest budget that a plan exists for, and the op that sets it."""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.core.errors import InfeasiblePlanError
from gascompile.passes.model.demands import demands
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.search import least_arena_bytes
from gascompile.passes.search.strategies import placements_of, strategies


@dataclass(frozen=True, slots=True)
class Need:
    """The least that the compute tier must hold."""

    arena_bytes: int
    op: int
    """The op that sets the whole budget: through its weights or through its activations."""


def feasible(problem: Problem) -> Need:
    """Return the smallest arena of any plan.

    Raises:
        InfeasiblePlanError: the budget of the compute tier is smaller than what the plan needs.
    """
    need = least_need(problem)
    tier = problem.machine.compute_tier
    if need.arena_bytes > problem.arena_limit_bytes:
        ops = problem.workload.ops
        raise InfeasiblePlanError(
            required_bytes=problem.base_bytes + need.arena_bytes,
            limit_bytes=problem.limits_bytes[tier],
            tier=tier,
            op=ops[need.op].name if ops else problem.workload.name,
            demands=demands(problem, need.arena_bytes),
        )
    return need


def least_need(problem: Problem) -> Need:
    """Return the smallest arena over all placements that the slow tiers can hold.

    Where they can hold everything, streaming everything needs least: what stays of an op's own
    weights takes the same room, and what stays of others takes more.
    """
    streamed = placements_of(problem, frozenset(), "all_streamed")
    candidates = streamed[:1] or [
        placement
        for family in strategies(problem)
        for candidate in family.members()
        for placement in placements_of(problem, candidate.residents, candidate.strategy)[:1]
    ]
    arena_bytes, op = min(least_arena_bytes(problem, placement) for placement in candidates)
    if problem.live.peak_bytes > arena_bytes:
        op = problem.live.peak_op
    return Need(arena_bytes, op)
