"""Rank runs: what the last training step took on each rank, which ranks tell each other as they meet for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.core.ranks import MICROSECOND
from gascompile.core.reports import RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What a step took on one rank."""

    rows: int
    """Of its batch; 1 where ranks do not look at them."""
    time_s: float
    """Without exchanges."""
    waited_s: float
    """In exchanges: for the network, and for the other ranks."""
    peak_bytes: int
    """Of the tier that computes."""
    moved_bytes: int
    """Over links of this rank."""


class RankRuns:
    """What this rank tells of its last step, and what all have told."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self.time_s = 0.0
        """Of this rank's last training step, without exchanges."""
        self.of_all: tuple[RankRun, ...] = ()
        """Of the training step before the newest; none before the second."""
        self._waited_s, self._peak_bytes, self._moved_bytes = 0.0, 0, 0
        self._rows: Sequence[int] = ()
        """Of the newest training step."""

    @property
    def numbers(self) -> list[int]:
        """What ranks compare: microseconds, those of waits, and bytes."""
        times = [int(time_s / MICROSECOND) for time_s in (self.time_s, self._waited_s)]
        return [*times, self._peak_bytes, self._moved_bytes]

    def ran(self, report: RunReport, waited_s: float, tier: str) -> None:
        """Take note of a training step that has run here; ``tier`` computes."""
        self.time_s = max(report.seconds - waited_s, 0.0)
        self._waited_s = waited_s
        self._peak_bytes = report.peak_bytes.get(tier, 0)
        self._moved_bytes = sum(report.link_bytes.values())

    def told(self, table: Sequence[Sequence[int]], rows: Sequence[int], *, trains: bool) -> None:
        """Know what all ranks have told.

        Args:
            table: ``numbers`` by what they are of, each of all ranks.
            rows: each rank's in the step that comes.
            trains: whether that one trains.
        """
        if self._rows:
            self.of_all = tuple(
                RankRun(
                    rows=count,
                    time_s=time * MICROSECOND,
                    waited_s=waited * MICROSECOND,
                    peak_bytes=peak_bytes,
                    moved_bytes=moved_bytes,
                )
                for count, time, waited, peak_bytes, moved_bytes in zip(
                    self._rows, *table, strict=True
                )
            )
        if trains:
            self._rows = tuple(rows)
