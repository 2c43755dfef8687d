"""The result of planning intervals: moves on the heap, and what is proven about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.core.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """Steps of one iteration; every tensor lives on the heap."""

    steps: tuple[Step, ...]
    homes: Mapping[str, str]
    """Tier in which each tensor rests between iterations."""
    sites: tuple[str, ...]
    """Tier at which each op runs."""
    seconds: float
    """Of one iteration; in the steady state where the workload repeats."""
    bound_s: float
    """No plan is faster."""
    timed_out: bool
    """The clock ended the search before the gap was reached."""
    strategy: str
    """Which candidate won."""
    solver: str
    """``highs`` or ``cbc``; ``none`` where no solver was needed or there is none."""
