"""Ladder: what exchanges of a few sizes take between the ranks of a job, measured when they meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from gascompile.runtime.collectives.exchange import Exchange

_SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20)
"""[Empirical] From 4 MiB on seconds grow with bytes, within the scatter of a shared machine."""
_REPEATS = 3
_GRADE = 2.0
"""Plans are made anew where exchanges take so much more or less. [Empirical] Between two processes of one busy host the
same exchange takes 0.7 to 1.4 of its median."""
Rungs = Sequence[tuple[int, float]]


class Ladder:
    """Seconds by bytes, for sums on all ranks and for sums and gathers of parts."""

    def __init__(self, exchange: Exchange) -> None:
        """Measure; all ranks do so at once. A fifth of a second between two processes of one host."""
        self._whole = _measured(exchange.add)
        size = exchange.size

        def part(values: torch.Tensor) -> None:
            count = values.numel() // size
            sizes = [count] * (size - 1) + [values.numel() - count * (size - 1)]
            exchange.add_part(values, sizes)

        self._part = _measured(part)

    def seconds(self, size_bytes: int, *, divided: bool) -> float:
        """Return what an exchange of so many bytes takes.

        Args:
            size_bytes: of the whole tensor or range.
            divided: each rank has a part of the result, or gives a part of it.
        """
        return interpolated(self._part if divided else self._whole, size_bytes)

    @property
    def grade(self) -> str:
        """Tell networks apart whose plans and predictions do not hold for each other."""
        return " ".join(f"{math.log(of[-1][1], _GRADE):.0f}" for of in (self._whole, self._part))


def _measured(exchange: Callable[[torch.Tensor], object]) -> list[tuple[int, float]]:
    found = []
    for size_bytes in _SIZES_BYTES:
        values = torch.zeros(size_bytes // torch.float32.itemsize)
        times_s = []
        for _ in range(_REPEATS):
            begin_s = time.perf_counter()
            exchange(values)
            times_s.append(time.perf_counter() - begin_s)
        found.append((size_bytes, sorted(times_s)[_REPEATS // 2]))
    return found


def interpolated(rungs: Rungs, size_bytes: int) -> float:
    """Return the seconds at a size: between two rungs along the line, beyond the last in proportion to it."""
    first, last = rungs[0], rungs[-1]
    if size_bytes <= first[0]:
        return first[1]
    if size_bytes >= last[0]:
        return last[1] * size_bytes / last[0]
    (low, low_s), (high, high_s) = next(p for p in pairwise(rungs) if size_bytes <= p[1][0])
    return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)
