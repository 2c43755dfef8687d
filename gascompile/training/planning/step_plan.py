"""Step plan: the plan of a step's or an evaluation's workload."""

from __future__ import annotations

from collections.abc import Mapping

from gascompile.core.config import CompileConfig
from gascompile.core.machine import Budget, Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.passes.plan.make_plan import make_plan


def step_plan(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    config: CompileConfig,
    *,
    fingerprint: Mapping[str, str],
    reserved_bytes: int,
) -> Plan:
    """Return the plan.

    Args:
        fingerprint: digests of what the plan is made from, written into it.
        reserved_bytes: of the budget, for transfers.

    Raises:
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
    """
    return make_plan(
        workload,
        machine,
        budget,
        fingerprint=fingerprint,
        time_limit_s=config.time_limit_s,
        mip_gap=config.mip_gap,
        reserved_bytes=reserved_bytes,
        move_all=True,
        has_arena=False,
    )
