"""Products in ``float32`` by oneDNN in the place of MKL, which torch calls for them, where that is the faster library.

MKL has its AVX-512 kernels for Intel's processors alone; oneDNN asks what the processor can do. Sums may be added in
another order, so this is for runs whose results are eager's within rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

_LEAST_BYTES = 1 << 20
"""Of a weight."""
_LEAST_ROWS = 512
"""Of a weight, and its least columns. [Empirical] On an EPYC (Zen 4, two threads) products of 1 to 512 rows with
such weights take 1.05 to 3.6 times as long in MKL; with 256 x 256 oneDNN takes up to twice as long."""
_SCRATCH_BYTES_PER_THREAD = 263_168
"""[Empirical] The most that the allocator counted beside a result: weights of 512 x 512 to 4096 x 4096, 20000 x 512 and
the other way round, 1 to 600 rows, 1, 2, 4 and 16 threads."""


@functools.cache
def is_faster_here() -> bool:
    """Return whether this processor is one on which MKL leaves AVX-512 alone, and torch has both libraries."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _vendor() not in {"", "GenuineIntel"}
    )


def scratch_bytes() -> int:
    """Return what a product takes beside its result, with torch's threads of now."""
    return _SCRATCH_BYTES_PER_THREAD * torch.get_num_threads()


def takes(weight: torch.Tensor) -> bool:
    """Return whether products with ``weight`` are worth it; a fake tensor will do."""
    return (
        weight.dtype is torch.float32
        and weight.dim() == 2
        and min(weight.shape) >= _LEAST_ROWS
        and weight.numel() * weight.itemsize >= _LEAST_BYTES
        and weight.is_contiguous()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what ``torch.nn.functional.linear`` does, within rounding; by that itself where oneDNN does not pay.

    Beside the result it takes up to ``scratch_bytes``. There is no backward pass.
    """
    # Whoever switches oneDNN off, as to look for a fault, means this one, too.
    if (
        not (takes(weight) and _is_plain(x, weight, bias))
        or torch.is_autocast_enabled("cpu")
        or not torch._C._get_mkldnn_enabled()
    ):
        return torch.nn.functional.linear(x, weight, bias)
    return _product()(x, weight, bias, "none", [], "")


def _is_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether the other operands are dense and of the sizes that the kernel takes them for, unasked."""
    num_rows, num_columns = weight.shape
    return (
        x.dtype is torch.float32
        and x.dim() > 0
        and x.shape[-1] == num_columns
        and x.numel() > 0
        and x.is_contiguous()
        and (
            bias is None
            or (bias.dtype is torch.float32 and bias.shape == (num_rows,) and bias.is_contiguous())
        )
    )


@functools.cache
def _product() -> Callable[..., torch.Tensor]:
    # What the overload calls: each layer above it takes a microsecond.
    found: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default._op
    return found


def _vendor() -> str:
    """Return who made the processor, in its own words; nothing where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    line = next((one for one in lines if one.startswith("vendor_id")), "")
    return line.partition(":")[2].strip()
