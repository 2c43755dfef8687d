"""What a device's plan takes beside its own tensors: inputs in its memory, pinned memory on the host.

Where the host computes, inputs are the caller's and files are read to where they are used: nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gascompile.errors import Demand, InfeasiblePlanError
from gascompile.ir import Budget, Machine, Plan, TensorKind, Workload
from gascompile.runtime.pinned import HOST, passing_bytes, pinned_bytes

_TRIES = 4
"""Each leaves the host less; whole pages of divided weights are known only once they are divided."""


def placed_bytes(workload: Workload, machine: Machine) -> int:
    """Return the bytes that the inputs of a run take of the tier that computes, copied there from the host."""
    if machine.compute_tier == HOST:
        return 0
    return sum(t.size_bytes for t in workload.tensors if t.kind is TensorKind.INPUT)


def plan_with_host(
    make: Callable[[Budget], Plan], workload: Workload, machine: Machine, budget: Budget
) -> Plan:
    """Return the plan that ``make`` finds for what ``budget`` leaves of the host's memory.

    Raises:
        InfeasiblePlanError: what bytes pass through on their way to the device is more than the host may give.
    """
    limits_bytes = budget.limits_bytes(machine)
    if machine.compute_tier == HOST or HOST not in limits_bytes:
        return make(budget)
    needed_bytes = passing_bytes(workload.ops, machine.io)
    left_bytes = limits_bytes[HOST] - needed_bytes
    for tries_left in reversed(range(_TRIES)):
        if left_bytes < 0:
            break
        plan = replace(make(replace(budget, cpu=left_bytes)), budget_bytes=limits_bytes)
        over_bytes = pinned_bytes(plan) - limits_bytes[HOST]
        if over_bytes <= 0:
            return plan
        # The last try keeps no weight there at all.
        left_bytes = max(left_bytes - over_bytes, 0) if tries_left > 1 else 0
    raise InfeasiblePlanError(
        required_bytes=max(needed_bytes, limits_bytes[HOST] + 1),
        limit_bytes=limits_bytes[HOST],
        tier=HOST,
        op=workload.ops[0].name,
        demands=(
            Demand(
                kind="reserved",
                name=f"pinned memory for {machine.io.num_threads} reading threads",
                size_bytes=needed_bytes,
            ),
        ),
    )


def without_sizes(machine: Machine) -> Machine:
    """Return ``machine`` without its tiers' sizes; those that matter to a plan are its budget's limits."""
    return replace(
        machine, tiers={name: replace(tier, size_bytes=0) for name, tier in machine.tiers.items()}
    )
