"""Refuses the content of a plan that was read from a file: its machine, its workload, its numbers.

What fits together is for ``passes.verify`` to say; here it is only made sure that it can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from gascompile.core.checks.machine import check_machine
from gascompile.core.checks.workload import check_content, check_count
from gascompile.core.errors import FormatError
from gascompile.core.plan import LinkAccount, PlaceAccount, Plan
from gascompile.core.sizes import MAX_SIZE_BYTES
from gascompile.core.steps import Compute, Recompute

_MAX_STEPS_PER_OP = 1000  # moves and waits: plans have a few


def check_plan_content(plan: Plan, *, where: str) -> None:
    """Return if the parts of ``plan`` make sense each by itself.

    Raises:
        FormatError: names the first field that makes no sense.
    """
    check_count(len(plan.workload.tensors), f"{where}.workload.tensors")
    check_count(len(plan.workload.ops), f"{where}.workload.ops")
    check_machine(plan.machine, where=f"{where}.machine")
    check_content(plan.workload, where=f"{where}.workload", is_captured=True)
    if len(plan.steps) > _MAX_STEPS_PER_OP * (len(plan.ops) + 1):
        raise FormatError(f"{where}.steps: {len(plan.steps)} for {len(plan.ops)} ops; plan again")
    for listed, field in ((plan.places, "places"), (plan.links, "links")):
        _check_accounts(listed, f"{where}.{field}")
    for i, step in enumerate(plan.steps):
        _check_step(plan, step, f"{where}.steps[{i}]")
    for name, tensor in plan.tensors.items():
        if tensor.address is not None and not 0 <= tensor.address <= MAX_SIZE_BYTES:
            raise FormatError(f"{where}.tensors.{name!a}: {tensor.address} is no address")
        if not 0 <= tensor.size_bytes <= MAX_SIZE_BYTES:
            raise FormatError(f"{where}.tensors.{name!a}: {tensor.size_bytes} is no size")


def _check_accounts(listed: Sequence[PlaceAccount | LinkAccount], where: str) -> None:
    seen: set[str] = set()
    for i, account in enumerate(listed):
        if account.name in seen:
            raise FormatError(
                f"{where}[{i}].name: {ascii(account.name)[:200]} has two accounts; plan again"
            )
        seen.add(account.name)
        for field in fields(account):
            size_bytes = getattr(account, field.name)
            is_size = not isinstance(size_bytes, int) or 0 <= size_bytes <= 2 * MAX_SIZE_BYTES
            if not is_size:
                raise FormatError(f"{where}[{i}].{field.name}: {size_bytes} is no size; plan again")


def _check_step(plan: Plan, step: object, where: str) -> None:
    op = getattr(step, "op", 0)
    last = len(plan.ops) - isinstance(step, (Compute, Recompute))
    if not 0 <= op <= last or not 0 <= getattr(step, "source", 0) < max(len(plan.ops), 1):
        raise FormatError(f"{where}: the plan has {len(plan.ops)} ops, the step is of another")
    for field in ("address", "size_bytes"):
        number = getattr(step, field, 0)
        if number is not None and not 0 <= number <= MAX_SIZE_BYTES:
            raise FormatError(f"{where}: {number} is no address or size; plan again")
    site = getattr(step, "site", None)
    if site is not None and site not in set(plan.machine.tiers) - {plan.machine.compute_tier}:
        raise FormatError(f"{where}: {ascii(site)[:200]} is no other site; plan again")
    place = getattr(step, "place", None)
    if place is not None and place not in set(plan.machine.tiers) - {plan.machine.compute_tier}:
        raise FormatError(f"{where}: {ascii(place)[:200]} is no place in between; plan again")
    tensor = getattr(step, "tensor", None)
    if tensor is not None and tensor not in plan.tensors:
        raise FormatError(f"{where}: the plan has no tensor {ascii(tensor)[:200]}")
