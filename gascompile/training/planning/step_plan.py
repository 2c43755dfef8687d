"""Step plan: the plan of a step's or an evaluation's workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import Demand
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import PERSISTENT, TensorKind, Workload
from gascompile.passes.model.rounding import rounding_bytes
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.plan.within_host import within_host
from gascompile.runtime.memory.host_slots import HOST_BYTES
from gascompile.runtime.memory.lasting_accounts import with_host
from gascompile.runtime.memory.pinned import HOST


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

    def made(budget: Budget, placed_bytes: int = 0) -> Plan:
        return make_plan(
            workload,
            machine,
            budget,
            fingerprint=fingerprint,
            **config.search_limits,
            reserved_bytes=reserved_bytes + placed_bytes,
            move_all=True,
            has_arena=False,
        )

    if machine.compute_tier == HOST:
        return made(budget)
    inputs = (t.size_bytes for t in workload.tensors if t.kind is TensorKind.INPUT)
    placed_bytes = sum(inputs) + rounding_bytes(workload, machine)
    return _with_host(partial(made, placed_bytes=placed_bytes), workload, machine, budget)


def _with_host(
    made: Callable[[Budget], Plan], workload: Workload, machine: Machine, budget: Budget
) -> Plan:
    """Return a plan for a device whose slots on the host, and what transfers pass through, are within its budget."""
    limits_bytes = budget.limits_bytes(machine)
    lasting = [t.name for t in workload.tensors if t.kind in PERSISTENT]
    return within_host(
        made,
        lambda plan: with_host(plan, limits_bytes, lasting),
        budget,
        host=HOST,
        limit_bytes=limits_bytes[HOST],
        needed=Demand(kind="reserved", name="what transfers pass through", size_bytes=HOST_BYTES),
        op=workload.ops[0].name,
    )
