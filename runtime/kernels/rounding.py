"""Rounding to a narrower dtype: one instruction on a GPU, spelt out where Triton's interpreter would cut off."""

from __future__ import annotations

import triton
import triton.language as tl

from gascompile.runtime.kernels.launching import INTERPRETED

# Triton's compiler reads globals only as constants of its own.
_SPELT_OUT = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Return floating ``values`` in ``dtype``, rounded to the nearest and to even between two."""
    if _SPELT_OUT and dtype == tl.bfloat16:
        wide = values.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        # Half a step is added, less one bit where the kept part is even; a carry may go on to infinity.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(wide == wide, bits.to(tl.float32, bitcast=True), wide).to(tl.bfloat16)  # noqa: PLR0124
    return values.to(dtype)
