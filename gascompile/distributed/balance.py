"""Balance: rows of each global batch per rank, in proportion to how fast ranks were found to be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_WORTH = 1.08
"""Of how much shorter the slowest rank's time has to become. [Empirical] Steps of one rank differ by 3 to 5 % on a
quiet machine, and other rows are another plan, which takes as long as some steps."""
_STEADY = 3
"""Steps in a row, each of which shows it. Rows are by what these took: [Empirical] an average that still had steps of
before in it gave a rank that had lost half its core a row of 32 too many, 6 % and too little for another change."""


class Balance:
    """Rows per rank. All ranks see the same times, so all come to the same rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        """Begin with ``rows``."""
        self.rows = list(rows)
        self._agreed: list[list[float]] = []
        """Seconds of a row on each rank, in each of the newest steps that show that other rows are worth it."""

    def learn(self, times_s: Sequence[float], rows: Sequence[int]) -> bool:
        """Take note of what a step took on each rank, without waiting for others; return whether rows change.

        Args:
            times_s: of each rank.
            rows: that each rank had in this step.
        """
        per_row = [time_s / max(count, 1) for time_s, count in zip(times_s, rows, strict=True)]
        if min(per_row) <= 0:
            return False
        if self._better(per_row) is None:
            self._agreed.clear()
            return False
        self._agreed.append(per_row)
        if len(self._agreed) < _STEADY:
            return False
        typical = [statistics.median(times_s) for times_s in zip(*self._agreed, strict=True)]
        wanted = self._better(typical)
        self._agreed.clear()
        self.rows = wanted or self.rows
        return wanted is not None

    def _better(self, per_row: Sequence[float]) -> list[int] | None:
        """Return rows that are worth a change, by the seconds of a row on each rank."""
        wanted = divided(sum(self.rows), [1 / time_s for time_s in per_row])
        now_s, then_s = (_slowest_s(rows, per_row) for rows in (self.rows, wanted))
        return wanted if now_s > _WORTH * then_s else None


def _slowest_s(rows: Sequence[int], per_row: Sequence[float]) -> float:
    return max(count * time_s for count, time_s in zip(rows, per_row, strict=True))


def divided(total: int, speeds: Sequence[float]) -> list[int]:
    """Divide ``total`` rows so that the slowest rank is done first: one row each at least, then where it costs least.

    Optimal for times in proportion to rows: each row goes where the time with it is the smallest.
    """
    rows = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        best = min(range(len(speeds)), key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))
        rows[best] += 1
    return rows
