"""Step plan: the plan of a step's or an evaluation's workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import Demand, InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import PERSISTENT, TensorKind, Workload
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.host_slots import HOST_BYTES
from gascompile.runtime.memory.lasting_accounts import with_host
from gascompile.runtime.memory.pinned import HOST

_TRIES = 4
"""Each leaves the host less: how slots lie beside each other is known only once there is a plan."""


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
            time_limit_s=config.time_limit_s,
            mip_gap=config.mip_gap,
            reserved_bytes=reserved_bytes + placed_bytes,
            move_all=True,
            has_arena=False,
        )

    if machine.compute_tier == HOST:
        return made(budget)
    inputs = (t.size_bytes for t in workload.tensors if t.kind is TensorKind.INPUT)
    return _with_host(partial(made, placed_bytes=sum(inputs)), workload, machine, budget)


def _with_host(
    made: Callable[[Budget], Plan], workload: Workload, machine: Machine, budget: Budget
) -> Plan:
    """Return a plan for a device whose slots on the host, and what transfers pass through, are within its budget."""
    limits_bytes = budget.limits_bytes(machine)
    limit_bytes = limits_bytes[HOST]
    lasting = [t.name for t in workload.tensors if t.kind in PERSISTENT]
    left_bytes = limit_bytes - HOST_BYTES
    for tries_left in reversed(range(_TRIES)):
        if left_bytes < 0:
            break
        plan, over_bytes = with_host(
            made(budget.with_size(HOST, left_bytes)), limits_bytes, lasting
        )
        if over_bytes <= 0:
            verify(plan)
            return plan
        # The last try brings nothing there.
        left_bytes = max(left_bytes - over_bytes, 0) if tries_left > 1 else 0
    staging = Demand(kind="reserved", name="what transfers pass through", size_bytes=HOST_BYTES)
    raise InfeasiblePlanError(
        required_bytes=max(HOST_BYTES, limit_bytes + 1),
        limit_bytes=limit_bytes,
        tier=HOST,
        op=workload.ops[0].name,
        demands=(staging,),
    )
