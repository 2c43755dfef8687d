"""Effort: what the search for a plan may take, made once and handed down whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def _now_s() -> float:
    # Looked up when it is called: tests give planning a clock of their own.
    return time.perf_counter()


_MOST_PIVOTS = 30_000
"""Of one plan; [empirical] 5,000 a second on one core of an EPYC, and small problems take less than 6,000."""


@dataclass(slots=True)
class Pivots:
    """Iterations of the simplex method that a plan's searches may still take, so that all machines end alike."""

    left: int = _MOST_PIVOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What planning may take, and how good a plan is good enough."""

    time_limit_s: float = 20.0
    """Seconds of the whole plan; what is searched for may depend on them, never on what is left."""
    mip_gap: float = 0.01
    """Relative gap up to which a plan counts as optimal."""
    pivots: Pivots = field(default_factory=Pivots)
    """Taken by the programs whose solutions are placements."""
    begun_s: float = field(default_factory=_now_s)
    """On ``time.perf_counter``."""

    def left_s(self) -> float:
        """Return the seconds that are left; fewer than 0 where it took longer."""
        return self.time_limit_s - (time.perf_counter() - self.begun_s)
