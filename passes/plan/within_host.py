"""Within host: a plan for a device whose share of the host's memory is known only once there is a plan."""

from __future__ import annotations

from collections.abc import Callable

from gascompile.core.budget import Budget
from gascompile.core.errors import Demand, InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.passes.verify.walk import verify

_TRIES = 4
"""Each leaves the host less: how slots lie, and whole pages of divided weights, are known only once there is a plan."""


def within_host(
    make: Callable[[Budget], Plan],
    whole: Callable[[Plan], tuple[Plan, int]],
    budget: Budget,
    *,
    host: str,
    limit_bytes: int,
    needed: Demand,
    op: str,
) -> Plan:
    """Return the verified plan, which keeps the host's budget with all that it takes there.

    Args:
        make: plans for a budget.
        whole: a plan for the whole budget of the host, and by how much it takes more of that.
        budget: of all tiers.
        host: the host's tier.
        limit_bytes: of it.
        needed: what is taken there whatever the plan.
        op: named where nothing fits.

    Raises:
        InfeasiblePlanError: nothing fits.
    """
    left_bytes = limit_bytes - needed.size_bytes
    for tries_left in reversed(range(_TRIES)):
        if left_bytes < 0:
            break
        made = make(budget.with_size(host, left_bytes))
        plan, over_bytes = whole(made)
        if over_bytes <= 0:
            verify(plan)
            return plan
        # Of what it took, not of what it might have taken: else the same plan comes again. The last try brings
        # nothing there.
        taken_bytes = min(left_bytes, made.peak_bytes.get(host, left_bytes))
        left_bytes = max(taken_bytes - over_bytes, 0) if tries_left > 1 else 0
    raise InfeasiblePlanError(
        required_bytes=max(needed.size_bytes, limit_bytes + 1),
        limit_bytes=limit_bytes,
        tier=host,
        op=op,
        demands=(needed,),
    )
