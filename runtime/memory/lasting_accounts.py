"""What plans that move weights and states on the heap take of the host's memory. No torch in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gascompile.core.plan import Plan
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.core.steps import Offload, Release, Reload, Wait
from gascompile.core.workload import PERSISTENT, TensorKind
from gascompile.runtime.memory.host_slots import HOST_BYTES, Outside
from gascompile.runtime.memory.pinned import HOST

TRANSFER_BYTES = 4 * SPILL_BUFFER_BYTES
"""Of the host's budget where it computes: out and in, of what lasts and of activations."""
LEAST_BYTES = 64 << 10
"""A smaller state takes a drive as long as this one, and frees next to nothing."""


def moves_lasting(plan: Plan) -> bool:
    """Return whether a plan keeps weights and states on the heap, where they move."""
    site = plan.machine.compute_tier
    kinds = {tensor.name: tensor.kind for tensor in plan.workload.tensors}
    moved = any(
        isinstance(step, (Offload, Reload, Release, Wait))
        and step.address is None
        and kinds.get(step.tensor) in PERSISTENT
        for step in plan.steps
    )
    return moved or any(
        tensor.kind is TensorKind.WEIGHT and tensor.home == site and tensor.address is None
        for tensor in plan.tensors.values()
    )


def with_host(
    plan: Plan, limits_bytes: Mapping[str, int], lasting: Collection[str]
) -> tuple[Plan, int]:
    """Return a device's plan with what it takes of the host, and by how much that is more than the host may give.

    Args:
        plan: made for less than the host may give.
        limits_bytes: what each tier may give.
        lasting: names of what the plan keeps slots for.
    """
    plan = plan.with_accounts(budget_bytes=limits_bytes)
    taken_bytes = HOST_BYTES + Outside.of(plan, lasting, taken_bytes=HOST_BYTES).size_bytes
    pairs = zip(plan.workload.ops, plan.ops, strict=True)
    taken_bytes += max((spec.workspace_bytes for spec, op in pairs if op.site == HOST), default=0)
    beside_bytes = max(taken_bytes - plan.peak_bytes[HOST], 0)
    peak_bytes = {**plan.peak_bytes, HOST: plan.peak_bytes[HOST] + beside_bytes}
    plan = plan.with_accounts(beside_bytes={HOST: beside_bytes}, peak_bytes=peak_bytes)
    return plan, taken_bytes - limits_bytes[HOST]


def lasting_names(plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
    """Return the weights of a plan that ops read whole, and the states that a store keeps."""
    read = {name for op in plan.workload.ops for name in (*op.reads, *op.writes)}
    moved = {
        step.tensor
        for step in plan.steps
        if isinstance(step, (Offload, Reload, Release)) and step.address is None
    }
    site = plan.machine.compute_tier
    weights, states = set(), set()
    for tensor in plan.workload.tensors:
        if tensor.kind is TensorKind.WEIGHT and tensor.name in read:
            weights.add(tensor.name)
        elif tensor.kind is TensorKind.STATE and (
            tensor.name in moved or plan.tensors[tensor.name].home != site
        ):
            states.add(tensor.name)
    return frozenset(weights), frozenset(states)


def resident_states(plan: Plan) -> frozenset[str]:
    """Return large states that ops of a device change and that never leave it; the host changes the caller's own."""
    site = plan.machine.compute_tier
    if site == HOST:
        return frozenset()
    _, moved = lasting_names(plan)
    changed = {name for op in plan.workload.ops for name in op.writes}
    return frozenset(
        tensor.name
        for tensor in plan.workload.tensors
        if tensor.kind is TensorKind.STATE
        and tensor.name in changed - moved
        and tensor.size_bytes >= LEAST_BYTES
    )
