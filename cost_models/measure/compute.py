"""Times torch on this processor: products by rows, the stream of weights through it, the cost of one call.

Weights lie in huge pages, like in the runtime's arena, and are much larger than the caches: a plan's
weights come from memory. Of the repetitions one of the faster ones counts (``typical``): interference
only ever slows a run down, and where two threads wait for each other it does so by a hundred times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from gascompile.core.huge_pages import map_anonymous
from gascompile.core.machine import RatePoint

DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTH = 2048
"""Rows and columns of the weights of the products."""
ROWS = (1, 2, 8, 32, 128, 512)
FEW_ROWS = (1, 8, 128)

_WEIGHTS_BYTES = 128 << 20  # more than caches hold
_FILL = 0x3C
"""A byte whose repetition is a small number in every dtype."""
_MAX_CALL_S = 0.1
"""After a product that takes longer, no larger one is tried: some processors are 300 times slower in half
precision, and a few of them would break the time limit."""
_NUM_CALLS = 200
"""Of one tiny op between two looks at the clock, which share what that takes itself."""


class ColdWeights:
    """Weights that no cache holds: views of one block of memory."""

    def __init__(self, size_bytes: int = _WEIGHTS_BYTES) -> None:
        """Take and touch ``size_bytes``."""
        self._memory = map_anonymous(size_bytes)
        self.size_bytes = size_bytes
        torch.frombuffer(self._memory, dtype=torch.uint8).fill_(_FILL)

    def matrices(self, dtype: torch.dtype, columns: int = WIDTH) -> torch.Tensor:
        """Return square matrices of ``dtype`` that fill the block, one after the other."""
        count = self.size_bytes // (columns * columns * dtype.itemsize)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count * columns * columns)
        return flat.view(count, columns, columns)

    def place(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor of the shape and dtype of ``like`` in the ``number``-th of the places it fits into."""
        size_bytes = -(-like.numel() * like.element_size() // 64) * 64
        start = number % (self.size_bytes // size_bytes) * size_bytes
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def pass_s(self) -> float:
        """Return the seconds of one-row products with all of the block: what decoding does."""
        rows = self.matrices(torch.float32).view(-1, WIDTH)
        one = torch.ones(1, WIDTH)
        start = time.perf_counter()
        torch.nn.functional.linear(one, rows)
        return time.perf_counter() - start

    def bytes_per_s(self, num_passes: int = 9) -> float:
        """Return the typical rate of ``num_passes`` after a warm-up pass."""
        self.pass_s()
        return self.size_bytes / typical([self.pass_s() for _ in range(num_passes)])


def typical(times_s: Sequence[float]) -> float:
    """Return the time that a fifth of ``times_s`` fall below: what an undisturbed run takes."""
    return sorted(times_s)[len(times_s) // 5]


def matrix_rates(
    weights: ColdWeights, *, rows: Sequence[int], num_calls: int, limit_s: float
) -> Mapping[str, tuple[RatePoint, ...]]:
    """Return, per dtype name, the rate of products of each number of ``rows``.

    Each is typical of ``num_calls``, or of fewer where they take longer than their share of ``limit_s``.
    """
    share_s = limit_s / len(DTYPES) / len(rows) / 2
    points_of = {}
    for name in DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        points = []
        for count in rows:
            time_s = min(
                _product_s(weights.matrices(dtype), count, num_calls, share_s, alone=alone)
                for alone in (False, True)
            )
            points.append(product_point(rows=count, itemsize=dtype.itemsize, time_s=time_s))
            if time_s > _MAX_CALL_S:
                break
        points_of[name] = tuple(points)
    return points_of


def product_point(*, rows: int, itemsize: int, time_s: float, width: int = WIDTH) -> RatePoint:
    """Return the point of a product of ``rows`` with square weights that took ``time_s``."""
    flops = 2 * rows * width * width
    moved_bytes = itemsize * (width * width + 2 * rows * width)
    return RatePoint(flops_per_byte=flops / moved_bytes, flops_per_s=flops / time_s)


def _product_s(
    matrices: torch.Tensor, rows: int, num_calls: int, limit_s: float, *, alone: bool
) -> float:
    """Return the typical seconds of products with one matrix after the other; at least one is timed.

    On a busy machine threads that wait for each other lose far more than they gain; one ``alone`` does not.
    """
    num_threads = torch.get_num_threads()
    left = torch.ones(rows, matrices.shape[-1], dtype=matrices.dtype)
    times_s: list[float] = []
    if alone:
        torch.set_num_threads(1)
    try:
        torch.nn.functional.linear(left, matrices[-1])  # warms caches and kernels up
        stop = time.perf_counter() + limit_s
        while not times_s or (len(times_s) < num_calls and time.perf_counter() < stop):
            matrix = matrices[len(times_s) % len(matrices)]
            start = time.perf_counter()
            torch.nn.functional.linear(left, matrix)
            times_s.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(num_threads)
    return typical(times_s)


def op_overhead_s() -> float:
    """Return the seconds of one ATen call whose work is negligible."""
    one = torch.ones(1)
    add = torch.ops.aten.add.Tensor
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(_NUM_CALLS):
            add(one, one)
        times_s.append((time.perf_counter() - start) / _NUM_CALLS)
    return typical(times_s)
