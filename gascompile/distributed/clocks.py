"""Clocks: by how much those of ranks differ, from what each says as it comes to a meeting and leaves it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gascompile.distributed.ranks import Ranks

_MEETINGS = 8
"""[Empirical] The closest of eight meetings of two processes of a busy host tells their clocks to 0.2 ms."""
_NANOSECOND = 1e-9  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """This rank's clock, ``time.perf_counter``, beside rank 0's."""

    ahead_s: float
    error_s: float
    """The true difference is no more than this away."""


def clock_of(ranks: Ranks) -> RankClock:
    """Return how far this rank's clock is ahead of rank 0's; all ranks call it.

    Nobody leaves a meeting before all have come: rank 0's coming lies before this rank's leaving, and this one's coming
    before rank 0's leaving.

    Raises:
        RankError: a rank does something else, or has failed.
    """
    own = ranks.layout.rank
    least, most, came, left = -(1 << 62), 1 << 62, [0], 0
    for number in range(_MEETINGS + 1):
        here = time.perf_counter_ns()
        # What rank 0 says of its leaving is of the meeting before.
        table = ranks.compare("clocks", b"", [here, left])
        before, left = came, time.perf_counter_ns()
        came = [row[0] for row in table]
        most = min(most, left - came[0])
        if number:
            least = max(least, before[own] - table[0][1])
    if own == 0:
        return RankClock(ahead_s=0.0, error_s=0.0)
    return RankClock(
        ahead_s=(least + most) / 2 * _NANOSECOND, error_s=(most - least) / 2 * _NANOSECOND
    )
