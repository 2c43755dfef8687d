"""Rounding: what torch's allocator of a GPU counts more than the tensors of a run have.

It hands out whole blocks of 512 bytes, and one of over 1 MiB as it finds it where less than 1 MiB would be left of it.
Source: ``round_size`` and ``should_split`` in torch's ``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from itertools import accumulate

from gascompile.core.machine import Machine
from gascompile.core.sizes import MIB
from gascompile.core.workload import Workload
from gascompile.passes.model.liveness import lifetimes

_BLOCK_BYTES = 512
"""Every block is a multiple of it."""
_OF_AN_OP_BYTES = 8 * _BLOCK_BYTES
"""Of tensors that an op has of its own, whose sum is known."""
_MOST_LARGE = 32
"""Large blocks that are looser than their values, at most: values of one size find each other's, which fit."""


def rounding_bytes(workload: Workload, machine: Machine) -> int:
    """Return how much more the allocator may count than a plan does; 0 for machines that count every byte.

    Args:
        workload: whose activations are alive from the op that makes them to the last that reads them, all else always.
        machine: what computes.
    """
    if machine.compute_backend != "cuda" or not workload.ops:
        return 0
    spans, num_ops = lifetimes(workload), len(workload.ops)
    cut, kept = [0] * (num_ops + 1), [0] * (num_ops + 1)
    for tensor in workload.tensors:
        span = spans.get(tensor.name, range(num_ops))
        is_large = tensor.size_bytes >= MIB
        for i, sign in ((span.start, 1), (span.stop, -1)):
            cut[i] += sign * (-tensor.size_bytes % _BLOCK_BYTES)
            kept[i] += sign * is_large
    large_bytes = min(max(accumulate(kept)), _MOST_LARGE) * MIB
    return max(accumulate(cut)) + _OF_AN_OP_BYTES + large_bytes
