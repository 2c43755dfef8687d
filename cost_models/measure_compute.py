"""Times torch on this processor: matrix rates, the stream of weights through it, the cost of one call.

Interference only ever slows a run down, so each number is the best of a few repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
NUM_ROWS = 128
"""Rows of the matrix products: a prompt, or a batch of sequences."""

_SIZES = (256, 512, 1024, 2048)
_STEP_LIMIT_S = 0.006
"""A product that takes longer is not tried at the next size: some processors are 300 times slower in
half precision, and four times the work would break the time limit."""
_MIN_CALLS = 5
_CALL_LIMIT_S = 0.2
_NUM_CALLS = 200


def matrix_rates(*, limit_s: float) -> Mapping[str, float]:
    """Return FLOP/s of a 128-row product per dtype name; ``limit_s`` is shared among the dtypes."""
    share_s = limit_s / len(DTYPES) / 2
    num_threads = torch.get_num_threads()
    rates = {name: _matrix_rate(getattr(torch, name), share_s) for name in DTYPES}
    try:
        # On a busy machine threads that wait for each other lose more than they gain; one alone does not.
        torch.set_num_threads(1)
        alone = {name: _matrix_rate(getattr(torch, name), share_s) for name in DTYPES}
    finally:
        torch.set_num_threads(num_threads)
    return {name: max(rates[name], alone[name]) for name in DTYPES}


def _matrix_rate(dtype: torch.dtype, limit_s: float) -> float:
    stop = time.perf_counter() + limit_s
    best = 0.0
    for size in _SIZES:
        weights = torch.ones(size, size, dtype=dtype)
        rows = torch.ones(NUM_ROWS, size, dtype=dtype)
        time_s = _best_s(lambda w=weights, r=rows: torch.nn.functional.linear(r, w), stop)  # type: ignore[misc]
        best = max(best, 2 * NUM_ROWS * size * size / time_s)
        if time_s > _STEP_LIMIT_S:
            break
    return best


def _best_s(call: Callable[[], object], stop: float, num_repeats: int = 15) -> float:
    """Return the shortest of up to ``num_repeats`` calls; the first also warms caches and kernels up.

    A few calls are always made: on a busy machine one thread of a product may wait for a processor
    hundreds of times longer than the product takes, so a single slow call says nothing.
    """
    best_s = float("inf")
    for i in range(num_repeats):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best_s = min(best_s, now - start)
        if now > stop and (i >= _MIN_CALLS or now - start > _CALL_LIMIT_S):
            break
    return best_s


class WeightStream:
    """A one-row product with weights much larger than the caches: what decoding does with every weight."""

    def __init__(self, size_bytes: int = 128_000_000, columns: int = 4000) -> None:
        """Allocate and touch ``size_bytes`` of float32 weights."""
        self.weights = torch.ones(size_bytes // (4 * columns), columns)
        self._row = torch.ones(1, columns)

    def pass_s(self) -> float:
        """Return the seconds of one pass over the weights, with all of torch's threads."""
        start = time.perf_counter()
        torch.nn.functional.linear(self._row, self.weights)
        return time.perf_counter() - start

    def bytes_per_s(self, num_passes: int = 9) -> float:
        """Return the best rate of ``num_passes`` after a warm-up pass."""
        self.pass_s()
        return self.weights.nbytes / min(self.pass_s() for _ in range(num_passes))


def op_overhead_s() -> float:
    """Return the seconds of one ATen call whose work is negligible."""
    one = torch.ones(1)
    add = torch.ops.aten.add.Tensor

    def calls() -> None:
        for _ in range(_NUM_CALLS):
            add(one, one)

    return _best_s(calls, time.perf_counter() + 0.1) / _NUM_CALLS
