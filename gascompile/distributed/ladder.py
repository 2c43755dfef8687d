"""Ladder: what exchanges of a few sizes take between the ranks of a job, measured when they meet.

What was measured is kept and used again as long as the network is about as fast: the same exchange varies from one
measurement to the next, and plans and predictions are not to vary with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.runtime.collectives.exchange import Exchange

_SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20)
"""[Empirical] From 4 MiB on seconds grow with bytes, within the scatter of a shared machine."""
_REPEATS = 3
_BUSY, _FASTER = 2.0, 1.25
"""What was measured before holds for a network whose largest exchange takes up to so much longer now, as hosts may be
busy, and up to so much less. [Empirical] Between two processes of one busy host the same exchange takes 0.7 to 1.4 of
its median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What an exchange of one size takes."""

    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Seconds by bytes, for sums on all ranks and for sums and gathers of parts."""

    whole: tuple[Rung, ...]
    part: tuple[Rung, ...]
    busy: float = 1.0
    """Share of the time of a large exchange for which this rank's processor is at work, of all that ops have."""

    @staticmethod
    def measured(exchange: Exchange) -> Ladder:
        """Measure; all ranks do so at once. A fifth of a second between two processes of one host."""
        size = exchange.size

        def part(values: torch.Tensor) -> None:
            count = values.numel() // size
            sizes = [count] * (size - 1) + [values.numel() - count * (size - 1)]
            exchange.add_part(values, sizes)

        whole, _ = _measured(exchange.add)
        parts, busy = _measured(part)
        return Ladder(whole=whole, part=parts, busy=busy)

    def seconds(self, size_bytes: int, *, divided: bool) -> float:
        """Return what an exchange of so many bytes takes.

        Args:
            size_bytes: of the whole tensor or range.
            divided: each rank has a part of the result, or gives a part of it.
        """
        return interpolated(self.part if divided else self.whole, size_bytes)

    def as_kept(self, path: Path) -> Ladder:
        """Return what is kept in a file, where that is of a network about as fast; else keep this one."""
        kept = Ladder.kept(path)
        if kept is not None and kept._is_like(self):
            return kept
        # Without a place to keep it, the next job measures for itself.
        with contextlib.suppress(StorageError):
            serial.write_atomic(path, serial.dumps(self))
        return self

    @staticmethod
    def kept(path: Path) -> Ladder | None:
        """Return what is kept in a file; nothing where that cannot be used."""
        with contextlib.suppress(OSError, FormatError):
            kept = serial.from_json(Ladder, serial.parse_json(path.read_bytes(), where=str(path)))
            sizes = [tuple(rung.size_bytes for rung in rungs) for rungs in (kept.whole, kept.part)]
            if sizes == [_SIZES_BYTES] * 2 and min(r.time_s for r in kept.whole + kept.part) > 0.0:
                return kept
        return None

    def _is_like(self, other: Ladder) -> bool:
        """Return whether this one, which was kept, holds where the other was measured now."""
        ratios = (
            here[-1].time_s / there[-1].time_s
            for here, there in ((self.whole, other.whole), (self.part, other.part))
        )
        return all(1 / _BUSY < ratio < _FASTER for ratio in ratios)


def _measured(exchange: Callable[[torch.Tensor], object]) -> tuple[tuple[Rung, ...], float]:
    """Return what exchanges take, and the share of it that the largest keep the processor's threads busy."""
    found, busy = [], 1.0
    for size_bytes in _SIZES_BYTES:
        values = torch.zeros(size_bytes // torch.float32.itemsize)
        times_s = []
        first_s, first_work_s = time.perf_counter(), time.process_time()
        for _ in range(_REPEATS):
            begin_s = time.perf_counter()
            exchange(values)
            times_s.append(time.perf_counter() - begin_s)
        worked_s, passed_s = time.process_time() - first_work_s, time.perf_counter() - first_s
        busy = min(worked_s / passed_s, 1.0) / torch.get_num_threads()
        found.append(Rung(size_bytes=size_bytes, time_s=sorted(times_s)[_REPEATS // 2]))
    return tuple(found), busy


def interpolated(rungs: Sequence[Rung], size_bytes: int) -> float:
    """Return the seconds at a size: between two rungs along the line, beyond the last in proportion to it."""
    first, last = rungs[0], rungs[-1]
    if size_bytes <= first.size_bytes:
        return first.time_s
    if size_bytes >= last.size_bytes:
        return last.time_s * size_bytes / last.size_bytes
    low, high = next(p for p in pairwise(rungs) if size_bytes <= p[1].size_bytes)
    share = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return low.time_s + (high.time_s - low.time_s) * share
