"""Together: ranks time their ops at the same moment, as they run them in a step.

Ranks of a host share its memory's bandwidth, its caches and the clock of its cores: ops that are timed while the other
ranks wait or plan take less than those of a step. [Empirical] Two ranks of two cores: 10 to 20 % less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gascompile.core.ranks import RankLayout
from gascompile.distributed.votes import Votes

_PATIENCE_S = 10.0
"""Ranks capture the same step for as long as each needs; one that fails says nothing, and is found where all meet."""
_LOOK_S = 1e-3  # between looks at the store


class TimedTogether:
    """One rank's end. What ranks say lies between two of their meetings, of which all count the same."""

    def __init__(self, votes: Votes, layout: RankLayout, num_met: Callable[[], int]) -> None:
        """Use ``votes``; ``num_met`` counts the meetings of all ranks so far."""
        self._votes, self._layout, self._num_met = votes, layout, num_met
        self._last = -1, 0
        self.num_others = layout.size - 1

    def begin(self, *, is_needed: bool) -> None:
        """Return when the other ranks begin to time ops, too, or have said that they need not.

        Args:
            is_needed: this rank has ops to time; else it does not wait.
        """
        met, count = self._last
        count = count + 1 if met == self._num_met() else 0
        met = self._num_met()
        self._last = met, count
        self._votes.say(self._topic(met, count, self._layout.rank))
        if not is_needed:
            return
        until_s = time.monotonic() + _PATIENCE_S
        for rank in range(self._layout.size):
            topics = self._topic(met, count, rank), self._topic(met, -1, rank)
            while not any(map(self._votes.is_said, topics)) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)

    def skip(self) -> None:
        """Say that this rank times nothing before all meet again."""
        self._votes.say(self._topic(self._num_met(), -1, self._layout.rank))

    @staticmethod
    def _topic(met: int, count: int, rank: int) -> str:
        return f"times/{met}/{count}/{rank}"
