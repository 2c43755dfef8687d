"""Seconds of one op on one device: the roofline of its FLOPs and its bytes, plus the cost of launching it.

Rules for the rate of a dtype, the same for every machine:

* A floating dtype uses the device's measured or datasheet rate for exactly that dtype.
* A complex dtype uses the rate of the floating dtype of its parts (``complex64`` -> ``float32``).
* Integers and booleans have no matrix rate; their ops are bound by memory alone.
* A missing rate is an error, never a guess.

A rate with points is a measured roofline, memory traffic included, so it stands in for both terms: between
two points the seconds per byte grow linearly with the arithmetic intensity, which grows with the rows of
a product; below the first point they stay the same, and beyond the last one the rate does.
"""

from __future__ import annotations

from itertools import pairwise

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import ComputeRate, Machine, MemoryRate
from gascompile.formats.packings import packing_of

_PARTS_OF_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_CPU_DECODING_BYTES = {
    "bfloat16": 1.0,
    "float16": 1.0,
    "float32": 1.0,
    "int8": 2.2,
    "int9": 5.0,
    "int10": 4.0,
    "int12": 3.2,
    "int4": 3.5,
    "q8_0": 3.2,
    "q4_0": 3.2,
    "q4_k": 1.5,
    "q6_k": 2.1,
}
_CPU_UNPACKING_BYTES = {"gptq": 6.0, "awq": 7.0, "packed": 5.5, "fp8": 7.0}
"""Of forms whose parts lie apart, by their kind."""
_FUSED_ROWS = 16
"""Rows of inputs up to which a GPU decodes in the product's own kernel: ``kernels.MAX_ROWS``."""
_GPU_COMPUTE_BYTES = 2
"""Of a value that is decoded for a product of more rows, which writes and reads it."""
_MEMORY_BOUND_PREFIXES = ("int", "uint", "bool")


def op_time_s(
    *,
    flops: int,
    read_bytes: int,
    write_bytes: int,
    dtype: str,
    device: str,
    machine: Machine,
) -> float:
    """Return the seconds that an op takes on ``device`` when its operands are in that device's memory.

    ``max(flops / rate, (read_bytes + write_bytes) / memory bandwidth) + op overhead``; where the rate has
    points, ``flops / rate_at(flops per byte) + op overhead``.

    Args:
        flops: floating-point operations; a fused multiply-add counts as two.
        read_bytes: bytes read from the device's memory.
        write_bytes: bytes written to it.
        dtype: torch's name without the ``torch.`` prefix.
        device: a tier of ``machine`` that computes.
        machine: where the rates come from.

    Raises:
        UnsupportedOpError: the machine has no rate for the device or the dtype.
    """
    memory = _memory_rate(device, machine)
    moved_bytes = read_bytes + write_bytes
    memory_s = moved_bytes / memory.bandwidth_bytes_per_s
    if not flops or dtype.startswith(_MEMORY_BOUND_PREFIXES):
        return memory_s + memory.op_overhead_s
    rate = _compute_rate(dtype, device, machine)
    if rate.points and moved_bytes:
        return flops / rate_at(rate, flops / moved_bytes) + memory.op_overhead_s
    return max(flops / rate.flops_per_s, memory_s) + memory.op_overhead_s


def decoding_bytes(num_weights: int, form: str, *, is_gpu: bool, rows: int) -> float:
    """Return how many bytes more a product with a weight in ``form`` costs than its bytes as they move.

    A processor decodes into a scratch in its caches: [Empirical] bytes from memory that take as long. A GPU
    decodes in registers for few rows, and otherwise writes the weight out once and reads it.

    Args:
        num_weights: values that are decoded.
        form: their transfer format.
        is_gpu: whether a GPU computes.
        rows: of the product's input.
    """
    packing = packing_of(form)
    if not is_gpu:
        per_value = _CPU_UNPACKING_BYTES[packing.kind] if packing else _CPU_DECODING_BYTES[form]
        return per_value * num_weights
    return 0.0 if rows <= _FUSED_ROWS else 2 * _GPU_COMPUTE_BYTES * num_weights


def rate_at(rate: ComputeRate, flops_per_byte: float) -> float:
    """Return the FLOP/s that ``rate``, which has points, reaches at an intensity."""
    points = sorted(rate.points, key=lambda point: point.flops_per_byte)
    first, last = points[0], points[-1]
    if flops_per_byte >= last.flops_per_byte:
        return last.flops_per_s
    if flops_per_byte <= first.flops_per_byte:
        return first.flops_per_s * flops_per_byte / first.flops_per_byte
    low, high = next(pair for pair in pairwise(points) if flops_per_byte < pair[1].flops_per_byte)
    share = (flops_per_byte - low.flops_per_byte) / (high.flops_per_byte - low.flops_per_byte)
    low_s, high_s = (point.flops_per_byte / point.flops_per_s for point in (low, high))
    return flops_per_byte / (low_s + share * (high_s - low_s))


def _memory_rate(device: str, machine: Machine) -> MemoryRate:
    for rate in machine.memory:
        if rate.device == device:
            return rate
    known = ", ".join(sorted(rate.device for rate in machine.memory)) or "none"
    raise UnsupportedOpError(
        f"machine '{machine.name}' has no memory rate for device '{device}' (it has: {known}); "
        f'add one to "memory" in the machine\'s file, or plan for another device'
    )


def _compute_rate(dtype: str, device: str, machine: Machine) -> ComputeRate:
    wanted = _PARTS_OF_COMPLEX.get(dtype, dtype)
    for rate in machine.rates:
        if rate.device == device and rate.dtype == wanted:
            return rate
    known = ", ".join(sorted(rate.dtype for rate in machine.rates if rate.device == device))
    raise UnsupportedOpError(
        f"machine '{machine.name}' has no compute rate for {wanted} on device '{device}' "
        f'(it has: {known or "none"}); add one to "rates" in the machine\'s file, measure the '
        f"machine again, or convert the model to a dtype that it has"
    )
