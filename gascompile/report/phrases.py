"""Phrases: how tables and pages call what ``whatif`` found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size, format_time

if TYPE_CHECKING:  # numpy comes with it, which help and wrong usage need not wait for
    from gascompile.passes.explain.whatif import Variant


def change_of(plan: Plan, variant: Variant) -> str:
    """Return what is changed in a variant of a plan."""
    tier = plan.machine.compute_tier
    match variant.change:
        case "budget":
            return f"{format_size(variant.amount)} more in {variant.subject}"
        case "bandwidth":
            return f"{variant.amount / 1e9:.3g} GB/s more over {variant.subject}"
        case "drive":
            return "a second drive"
        case "next":
            size = plan.budget_bytes[tier] + variant.amount
            return f"next budget that helps: {format_size(size)}"
        case _:
            return f"half the budget: {format_size(plan.budget_bytes[tier] + variant.amount)}"


def signed(time_s: float) -> str:
    """Return a change of a time, with its sign."""
    if not time_s:
        return "0"
    return f"{'-' if time_s < 0 else '+'}{format_time(abs(time_s))}"
