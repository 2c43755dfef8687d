"""How much of the host's memory a plan for a device takes: what the device copies from, all of it pinned.

``Budget.cpu`` promises it: the slots that files are read through, the weights whose home is the host, each in
whole pages, and the room that single rows pass through. One count for whoever plans and for whoever runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from gascompile.core.errors import DeviceError
from gascompile.core.machine import IoSettings
from gascompile.core.plan import Plan
from gascompile.core.sizes import MIB, format_size, reserve_bytes
from gascompile.core.steps import Prefetch
from gascompile.core.workload import OpSpec
from gascompile.runtime.devices.probe import PINNED_MEMORY

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
    homes = {
        step.tensor: reserve_bytes(step.size_bytes)
        for step in plan.steps
        if isinstance(step, Prefetch) and plan.machine.link(step.link).source_tier == HOST
    }
    for name in gathered_here(plan):
        homes[name] = reserve_bytes(plan.tensors[name].size_bytes)
    return passing_bytes(plan.workload.ops, plan.machine.io) + sum(homes.values())


def gathered_here(plan: Plan) -> dict[str, int]:
    """Return the weights of which ops take rows from the host's memory, with the first such op."""
    found: dict[str, int] = {}
    for i, op in enumerate(plan.workload.ops):
        if op.gather_tier == HOST:
            found |= {name: i for name in op.gathers if name not in op.reads and name not in found}
    return found


def require_budget(plan: Plan, taken_bytes: int) -> None:
    """Return if ``taken_bytes`` of pinned memory are within the plan's budget.

    Raises:
        DeviceError: they are more.
    """
    limit_bytes = plan.budget_bytes.get(HOST)
    if plan.machine.compute_tier == HOST or limit_bytes is None or taken_bytes <= limit_bytes:
        return
    raise DeviceError(
        f"the plan of '{plan.workload.name}' pins {format_size(taken_bytes)} of host memory, its budget for "
        f"'{HOST}' is {format_size(limit_bytes)}; plan again with Budget({HOST}={taken_bytes}) or more",
        cause=PINNED_MEMORY,
    )
