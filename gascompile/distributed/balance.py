"""Balance: rows of each global batch per rank, in proportion to how fast ranks were found to be.

In two stages, as few steps say little: what is much better is done after three of them, what is a little better after
more, and taken back where steps have not become shorter by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_WORTH = 1.08
"""Of how much shorter the slowest rank's time has to become. [Empirical] Steps of one rank differ by 3 to 5 % on a
quiet machine, and other rows are another plan, which takes as long as some steps."""
_STEADY = 3
"""Steps in a row, each of which shows it. Rows are by what these took: [Empirical] an average that still had steps of
before in it gave a rank that had lost half its core a row of 32 too many, 6 % and too little for another change."""
_FINE_WORTH = 1.02
"""Of how much shorter it has to become by the middle of more steps. [Empirical] Of 72 rows one too many on half a core
is 2 to 4 % of a step, which three steps don't show; where steps differ by 3 %, rows change once or twice by it and end,
like those of 3 %, 1.4 % from the ideal in the mean of 1,500 drawn pairs of ranks."""
_MORE = 5
"""Steps with the same rows by which that is decided, and judged, or as many as take ``_LEAST_S``."""
_LEAST_S = 30.0
"""Planning for other rows takes 5 to 10 s, which small steps would not save for a long time."""
_FEW = 5
"""One of so many steps may show the opposite, as something disturbed it."""


class Balance:
    """Rows per rank. All ranks see the same times, so all come to the same rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        """Begin with ``rows``."""
        self.rows = list(rows)
        self._agreed: list[list[float]] = []
        """Seconds of a row on each rank, in each of the newest steps that show that other rows are worth it."""
        self._same: list[list[float]] = []
        """Seconds of a row on each rank, in steps with these rows that nothing has been decided by."""
        self._same_s = 0.0
        """What these took."""
        self._before: tuple[list[int], float] | None = None
        """Rows before a small change that has not been judged, and seconds of a step with them."""
        self._is_fine = False
        """Whether a small change was taken back: what was measured is no guide to a better one."""

    def learn(self, times_s: Sequence[float], rows: Sequence[int]) -> bool:
        """Take note of what a step took on each rank, without waiting for others; return whether rows change.

        Args:
            times_s: of each rank.
            rows: that each rank had in this step.
        """
        per_row = [time_s / max(count, 1) for time_s, count in zip(times_s, rows, strict=True)]
        if min(per_row) <= 0:
            return False
        before = self.rows
        if not self._much_better(per_row) and list(rows) == self.rows:
            self._a_little_better(per_row)
        return self.rows != before

    def _much_better(self, per_row: list[float]) -> bool:
        """Take rows that the newest steps, one by one, have shown to be much better; return whether there are any."""
        if self._better(per_row, _WORTH) is None:
            self._agreed.clear()
            return False
        self._agreed.append(per_row)
        if len(self._agreed) < _STEADY:
            return False
        wanted = self._better(_typical(self._agreed), _WORTH)
        self._agreed.clear()
        if wanted is None:
            return False
        self._forget()
        self.rows, self._before, self._is_fine = wanted, None, False
        return True

    def _a_little_better(self, per_row: list[float]) -> None:
        """Take rows that are better by the middle of several steps, or those of before where they were no worse."""
        if self._is_fine:
            return
        self._same.append(per_row)
        self._same_s += _slowest_s(self.rows, per_row)
        if len(self._same) < _MORE or self._same_s < _LEAST_S:
            return
        steps = self._forget()
        step_s = statistics.median(_slowest_s(self.rows, step) for step in steps)
        if self._before is not None and step_s >= self._before[1]:
            self.rows, self._before, self._is_fine = self._before[0], None, True
            return
        self._before = None
        wanted = self._better(_typical(steps), _FINE_WORTH)
        if wanted is None:
            return
        against = [
            step for step in steps if _slowest_s(wanted, step) >= _slowest_s(self.rows, step)
        ]
        if len(against) * _FEW <= len(steps):
            self.rows, self._before = wanted, (self.rows, step_s)

    def _forget(self) -> list[list[float]]:
        """Return the steps that nothing has been decided by, for the last time."""
        steps, self._same, self._same_s = self._same, [], 0.0
        return steps

    def _better(self, per_row: Sequence[float], worth: float) -> list[int] | None:
        """Return rows that are so much better, by the seconds of a row on each rank."""
        wanted = divided(sum(self.rows), [1 / time_s for time_s in per_row])
        now_s, then_s = (_slowest_s(rows, per_row) for rows in (self.rows, wanted))
        return wanted if now_s > worth * then_s else None


def _typical(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over steps of each rank's seconds of a row."""
    return [statistics.median(times_s) for times_s in zip(*steps, strict=True)]


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
