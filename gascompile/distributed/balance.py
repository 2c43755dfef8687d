"""Balance: rows of each global batch per rank, in proportion to how fast ranks were found to be."""

from __future__ import annotations

from collections.abc import Sequence

_WORTH = 1.08
"""Of how much shorter the slowest rank's time has to become. [Empirical] Steps of one rank differ by 3 to 5 % on a
quiet machine, and other rows are another plan, which takes as long as some steps."""
_STEADY = 3
"""Steps in a row that agree on it."""
_SHARE = 0.5
"""Of the newest step in the average: three steps at another speed count for seven eighths."""


class Balance:
    """Rows per rank. All ranks see the same times, so all come to the same rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        """Begin with ``rows``."""
        self.rows = list(rows)
        self._times_s: list[float] = []
        self._num_agreed = 0

    def learn(self, times_s: Sequence[float], rows: Sequence[int]) -> bool:
        """Take note of what a step took on each rank, without waiting for others; return whether rows change.

        Args:
            times_s: of each rank.
            rows: that each rank had in this step.
        """
        per_row = [time_s / max(count, 1) for time_s, count in zip(times_s, rows, strict=True)]
        if min(per_row) <= 0:
            return False
        before = self._times_s or per_row
        self._times_s = [
            _SHARE * new + (1 - _SHARE) * old for new, old in zip(per_row, before, strict=True)
        ]
        wanted = divided(sum(self.rows), [1 / time_s for time_s in self._times_s])
        now_s, then_s = self._slowest_s(self.rows), self._slowest_s(wanted)
        self._num_agreed = self._num_agreed + 1 if now_s > _WORTH * then_s else 0
        if self._num_agreed < _STEADY:
            return False
        self.rows, self._num_agreed = wanted, 0
        return True

    def _slowest_s(self, rows: Sequence[int]) -> float:
        return max(count * time_s for count, time_s in zip(rows, self._times_s, strict=True))


def divided(total: int, speeds: Sequence[float]) -> list[int]:
    """Divide ``total`` rows so that the slowest rank is done first: one row each at least, then where it costs least.

    Optimal for times in proportion to rows: each row goes where the time with it is the smallest.
    """
    rows = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        best = min(range(len(speeds)), key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))
        rows[best] += 1
    return rows
