"""How much of the host's memory a plan for a device takes: what the device copies from, all of it pinned.

``Budget.cpu`` promises it: the slots that files are read through, the weights whose home is the host, each in
whole pages, and the room that single rows pass through. One count for whoever plans and for whoever runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from gascompile.core.errors import DeviceError
from gascompile.core.machine import IoSettings
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan, weights_elsewhere
from gascompile.core.sizes import MIB, PAGE_BYTES, align_up, format_size, reserve_bytes
from gascompile.core.steps import Offload, Prefetch, Reload, fetched_to, is_push
from gascompile.core.workload import OpSpec, TensorKind

HOST = "cpu"
_ROWS_BYTES = 8 * MIB
"""Pinned memory for rows at most, unless one row is larger."""


def rows_bytes(ops: Iterable[OpSpec], row_bytes: int = 0) -> int:
    """Return what the rows that ``ops`` read one by one pass through; 0 where none does.

    Args:
        ops: of the plan.
        row_bytes: of the largest row, where that is known.
    """
    sizes = [size for op in ops for name, size in op.gathers.items() if name not in op.reads]
    return max(row_bytes, min(max(sizes), _ROWS_BYTES)) if sizes else 0


def passing_bytes(ops: Iterable[OpSpec], io: IoSettings) -> int:
    """Return the host memory that bytes on their way to a device pass through."""
    return io.staging_bytes + rows_bytes(ops)


def pinned_bytes(plan: Plan) -> int:
    """Return the host memory that a session of ``plan`` alone pins; 0 where the host computes."""
    if plan.machine.compute_tier == HOST:
        return 0
    middle = fetched_to(plan.steps)
    homes = {
        step.tensor: reserve_bytes(step.size_bytes)
        for step in plan.steps
        if isinstance(step, Prefetch)
        and plan.machine.link(step.link).source_tier == HOST
        and not is_push(step, middle)
    }
    for name in (*gathered_here(plan), *weights_elsewhere(plan)):
        homes[name] = reserve_bytes(plan.tensors[name].size_bytes)
    slots = crossing_slots(plan).values()
    homes_bytes = sum(homes.values()) + sum(align_up(size, PAGE_BYTES) for _, size in slots)
    half_way_bytes = plan.arena_bytes.get(HOST, 0)
    return passing_bytes(plan.workload.ops, plan.machine.io) + homes_bytes + half_way_bytes


def crossing_slots(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return offset and bytes of a slot in pinned memory for each tensor that moves between processors.

    No two share any: neither side ever waits for the other to be done with one.
    """
    sites = plan_sites(plan)
    slots: dict[str, tuple[int, int]] = {}
    offset = 0
    for step in plan.steps if sites is not None else ():
        if isinstance(step, (Offload, Reload)) and sites is not None and sites.is_crossing(step):
            slots[step.tensor] = (offset, step.size_bytes)
            offset += align_up(step.size_bytes, PAGE_BYTES)
    return slots


def host_bytes(plan: Plan) -> int:
    """Return the host memory that a session of ``plan`` takes: what it pins, and what ops that run there take."""
    if all(op.site == plan.machine.compute_tier for op in plan.ops):
        return pinned_bytes(plan)
    weights = (t for t in plan.tensors.values() if t.kind is TensorKind.WEIGHT and t.home == HOST)
    ops_bytes = plan.peak_bytes.get(HOST, 0) - sum(t.size_bytes for t in weights)
    return pinned_bytes(plan) + max(ops_bytes, 0)


def gathered_here(plan: Plan) -> dict[str, int]:
    """Return the weights of which ops take rows from the host's memory, with the first such op."""
    first_op: dict[str, int] = {}
    for i, op in enumerate(plan.workload.ops):
        if op.gather_tier == HOST:
            first_op |= {
                name: i for name in op.gathers if name not in op.reads and name not in first_op
            }
    return first_op


def host_first_use(plan: Plan) -> dict[str, int]:
    """Return the weights that a plan for a device keeps in the host's memory, with the first op that needs each."""
    first: dict[str, int] = {}
    middle = fetched_to(plan.steps)
    for step in plan.steps:
        is_ours = isinstance(step, Prefetch) and step.link.startswith(f"{HOST}->")
        if isinstance(step, Prefetch) and is_ours and not is_push(step, middle):
            first.setdefault(step.tensor, step.op)
    return {**gathered_here(plan), **weights_elsewhere(plan), **first}


def require_budget(plan: Plan, taken_bytes: int) -> None:
    """Return if ``taken_bytes`` of pinned memory are within the plan's budget.

    Raises:
        DeviceError: they are more.
    """
    limit_bytes = plan.budget_bytes.get(HOST)
    if plan.machine.compute_tier == HOST or limit_bytes is None or taken_bytes <= limit_bytes:
        return
    # Late: budgets are counted without torch, too.
    from gascompile.runtime.devices.probe import PINNED_MEMORY

    raise DeviceError(
        f"the plan of '{plan.workload.name}' pins {format_size(taken_bytes)} of host memory, its budget for "
        f"'{HOST}' is {format_size(limit_bytes)}; plan again with Budget({HOST}={taken_bytes}) or more",
        cause=PINNED_MEMORY,
    )
