"""What a device's plan takes beside its own tensors: inputs in its memory, pinned memory on the host.

Where the host computes, inputs are the caller's and files are read to where they are used: nothing is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from gascompile.core.budget import Budget
from gascompile.core.errors import Demand, InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.model.rounding import rounding_bytes
from gascompile.passes.plan.within_host import within_host
from gascompile.runtime.memory.lasting_accounts import lasting_names, moves_lasting, with_host
from gascompile.runtime.memory.pinned import HOST, host_bytes, passing_bytes

_GRAPHS_SHARE = 1 / 64
"""Of the budget, at most, is left to graphs: weights that do not stay cost more."""


def placed_bytes(workload: Workload, machine: Machine) -> int:
    """Return the bytes that the inputs of a run take of the tier that computes, copied there from the host."""
    if machine.compute_tier == HOST:
        return 0
    return sum(t.size_bytes for t in workload.tensors if t.kind is TensorKind.INPUT)


def graphs_bytes(workload: Workload, machine: Machine) -> int:
    """Return the most that CUDA graphs of a run keep, beside what the run takes op by op.

    Inputs and outputs once more; of all else at most what goes into each graph, and a copy of what comes from it.
    """
    if machine.compute_backend != "cuda":
        return 0
    ends = (TensorKind.INPUT, TensorKind.OUTPUT)
    ends_bytes = sum(t.size_bytes for t in workload.tensors if t.kind in ends)
    made_bytes = sum(t.size_bytes for t in workload.tensors if t.kind is TensorKind.ACTIVATION)
    return ends_bytes + 3 * made_bytes


def graphs_room_bytes(workload: Workload, machine: Machine, budget: Budget) -> int:
    """Return what a plan leaves to graphs: ``graphs_bytes`` where that is little of the budget, else nothing.

    Where graphs count, in decoding, they keep little, and a plan that takes all of the budget could have none.
    """
    limit_bytes = budget.limits_bytes(machine).get(machine.compute_tier)
    needed_bytes = graphs_bytes(workload, machine)
    if limit_bytes is None or needed_bytes > limit_bytes * _GRAPHS_SHARE:
        return 0
    return needed_bytes


def plan_on_device(
    make: Callable[[int, Budget], Plan], workload: Workload, machine: Machine, budget: Budget
) -> Plan:
    """Return the plan that ``make`` finds for what ``budget`` leaves of the host's memory, with room for graphs.

    There is none where the budget does not do for a plan and room.

    Args:
        make: plans with so many bytes of the tier that computes left free, for a budget.
        workload: what is planned.
        machine: what for.
        budget: of all tiers.

    Raises:
        InfeasiblePlanError: what bytes pass through on their way to the device is more than the host may give.
    """
    inputs_bytes = placed_bytes(workload, machine) + rounding_bytes(workload, machine)
    if room_bytes := graphs_room_bytes(workload, machine, budget):
        with contextlib.suppress(InfeasiblePlanError):
            with_room = partial(make, inputs_bytes + room_bytes)
            return _plan_with_host(with_room, workload, machine, budget)
    return _plan_with_host(partial(make, inputs_bytes), workload, machine, budget)


def _whole(plan: Plan, limits_bytes: Mapping[str, int]) -> tuple[Plan, int]:
    """Return a plan for the whole budget of the host, and by how much it takes more of that."""
    if moves_lasting(plan):
        return with_host(plan, limits_bytes, frozenset().union(*lasting_names(plan)))
    plan = plan.with_accounts(budget_bytes=limits_bytes)
    return plan, host_bytes(plan) - limits_bytes[HOST]


def _plan_with_host(
    make: Callable[[Budget], Plan], workload: Workload, machine: Machine, budget: Budget
) -> Plan:
    limits_bytes = budget.limits_bytes(machine)
    if machine.compute_tier == HOST or HOST not in limits_bytes:
        return make(budget)
    needed = Demand(
        kind="reserved",
        name=f"pinned memory for {machine.io.num_threads} reading threads",
        size_bytes=passing_bytes(workload.ops, machine.io),
    )
    return within_host(
        make,
        partial(_whole, limits_bytes=limits_bytes),
        budget,
        host=HOST,
        limit_bytes=limits_bytes[HOST],
        needed=needed,
        op=next((op.name for op in workload.ops), workload.name),
    )
