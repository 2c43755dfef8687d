"""Step plan: the plan of a step's or an evaluation's workload."""

from __future__ import annotations

from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Budget, Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.formats.allocation import packing_fields
from gascompile.passes.plan.make_plan import make_plan


def step_plan(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    config: CompileConfig,
    *,
    reserved_bytes: int,
) -> Plan:
    """Return the plan.

    Args:
        reserved_bytes: of the budget, for transfers.

    Raises:
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
    """
    prints = {
        "graph": serial.digest(workload),
        "machine": serial.digest(machine),
        "budget": serial.digest(budget.limits_bytes(machine)),
        "options": serial.digest({**config.fingerprint_fields(), **packing_fields()}),
    }
    return make_plan(
        workload,
        machine,
        budget,
        fingerprint=prints,
        time_limit_s=config.time_limit_s,
        mip_gap=config.mip_gap,
        reserved_bytes=reserved_bytes,
        move_all=True,
        has_arena=False,
    )
