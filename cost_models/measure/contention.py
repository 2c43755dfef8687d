"""Times products on two threads of this process at once, as ops of two sites run, beside one thread alone.

Where both have processors of their own, they lose what memory and caches cannot give to both; where each is given as
many threads as there are processors, they take turns.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from gascompile.core.machine import InterferencePoint
from gascompile.cost_models.measure.compute import ColdWeights, product_point

_ROWS = (1, 128)
"""The one bound by memory, the other by arithmetic."""
_MOST_LOST = 0.9
"""Who loses more was interrupted by something else."""


def contention_points(weights: ColdWeights, *, limit_s: float) -> tuple[InterferencePoint, ...]:
    """Return the share of its speed that a product loses beside another, by arithmetic intensity.

    Args:
        weights: that no cache holds; each thread takes half of the matrices.
        limit_s: for all of it; each product is timed five times at least.
    """
    matrices = weights.matrices(torch.float32)
    share_s = limit_s / len(_ROWS) / 3
    points = []
    for rows in _ROWS:
        here, there = (_products(matrices[half::2], rows) for half in (0, 1))
        before_s = statistics.median(_timed(here, share_s))
        # Of two that take turns, one may get most of them.
        both_s = statistics.harmonic_mean(_beside(here, there, share_s))
        alone_s = min(before_s, statistics.median(_timed(here, share_s)))
        point = product_point(rows=rows, itemsize=matrices.itemsize, time_s=alone_s)
        lost_share = min(max(0.0, 1 - alone_s / both_s), _MOST_LOST)
        points.append(InterferencePoint(flops_per_byte=point.flops_per_byte, lost_share=lost_share))
    return tuple(points)


def _products(matrices: torch.Tensor, rows: int) -> Callable[[int], object]:
    left = torch.ones(rows, matrices.shape[-1])
    return lambda number: torch.nn.functional.linear(left, matrices[number % len(matrices)])


def _timed(call: Callable[[int], object], limit_s: float) -> list[float]:
    """Return the seconds of calls for ``limit_s``, and at least of five."""
    call(0)
    times_s: list[float] = []
    stop = time.perf_counter() + limit_s
    while len(times_s) < 5 or time.perf_counter() < stop:
        start = time.perf_counter()
        call(len(times_s) + 1)
        times_s.append(time.perf_counter() - start)
    return times_s


def _beside(
    here: Callable[[int], object], there: Callable[[int], object], limit_s: float
) -> tuple[float, float]:
    """Return the median seconds of calls on this thread, and on another beside it."""
    begun, ended = threading.Event(), threading.Event()
    times_s: list[float] = []

    def others() -> None:
        torch.get_num_threads()  # lets this thread have as many as the other
        there(0)
        begun.set()
        while not times_s or not ended.is_set():
            start = time.perf_counter()
            there(len(times_s) + 1)
            times_s.append(time.perf_counter() - start)

    thread = threading.Thread(target=others, name="gascompile-contention")
    thread.start()
    try:
        begun.wait()
        here_s = statistics.median(_timed(here, limit_s))
    finally:
        ended.set()
        thread.join()
    return here_s, statistics.median(times_s)
