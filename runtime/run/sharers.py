"""Sharers: who keeps memory of a device from run to run, and gives it back where a plan needs it."""

from __future__ import annotations

from gascompile.core.plan import Plan
from gascompile.runtime.protocols import Sharer
from gascompile.runtime.run.session import Session


def make_room(session: Session, plan: Plan, *, but: Sharer | None = None) -> None:
    """Before a run of ``plan``: have memory given back beside which it might pass its budget.

    Args:
        session: whose sharers.
        plan: whose peak is the most that the run takes.
        but: the one that the run itself needs.
    """
    if not session.sharers:
        return
    others = [sharer for sharer in session.sharers if sharer is not but and sharer.held_bytes]
    tier = plan.machine.compute_tier
    held_bytes = sum(sharer.held_bytes for sharer in others)
    limit_bytes = plan.budget_bytes.get(tier)
    needed_bytes = plan.peak_bytes.get(tier, 0)
    if held_bytes and limit_bytes is not None and needed_bytes + held_bytes > limit_bytes:
        for sharer in others:
            sharer.give_back()
