"""Costed: the plan of a model's workload, for all that its budget leaves on the host and the device. No torch in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from gascompile.api.device_budget import plan_on_device
from gascompile.api.objective import planned
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.plan.move_anything import OnHeap


def plan_costed(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    config: CompileConfig,
    *,
    prints: Mapping[str, str],
    warnings: Sequence[str],
    may_move: OnHeap | None,
    reserved_bytes: int = 0,
    arena_of: Plan | None = None,
    has_hops: bool = False,
) -> Plan:
    """Return the verified plan of a model's workload.

    Args:
        workload: what was costed.
        machine: what to plan for.
        budget: of all tiers.
        config: options of the search.
        prints: what the plan is looked up by.
        warnings: what its user is told.
        may_move: what a plan may do with states and activations.
        reserved_bytes: of the tier that computes, for others.
        arena_of: a plan whose arena this one shares.
        has_hops: weights may wait half the way.

    Raises:
        InfeasiblePlanError: the budget is too small.
    """

    def make(taken_bytes: int, given: Budget) -> Plan:
        plan = partial(
            make_plan,
            machine=machine,
            budget=given,
            fingerprint=prints,
            warnings=tuple(warnings),
            reserved_bytes=reserved_bytes + taken_bytes,
            arena_of=arena_of,
            on_heap=may_move,
            has_hops=has_hops,
            **config.search_limits,
        )
        return planned(plan, workload, machine, config, is_free=arena_of is None)

    return plan_on_device(make, workload, machine, budget)
