"""Coding of optimizer states in 8 bits inside Triton kernels: what ``state_codes`` says, in the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from gascompile.runtime.kernels import state_codes

_OCTAVE = tl.constexpr(state_codes.OCTAVE)
_LARGEST_SCALE = tl.constexpr(state_codes.LARGEST_SCALE)
_NOT_FINITE = tl.constexpr(state_codes.NOT_FINITE)
_FACTOR = tl.constexpr(state_codes.NOT_FINITE - 1)
_DITHERS = tl.constexpr(state_codes.DITHERS)
_GOLDEN = tl.constexpr(state_codes.GOLDEN)
_SPREAD = tl.constexpr(32 - state_codes.DITHER_BITS)
_DITHER_MASK = tl.constexpr((1 << state_codes.DITHER_BITS) - 1)
_DITHER_STEP = tl.constexpr(2.0**-state_codes.DITHER_BITS)


@triton.jit
def decoded(code, scale, offset: tl.constexpr):
    """Return the values of codes without signs; ``offset`` is the code's."""
    bits = code.to(tl.float32).to(tl.int32, bitcast=True)
    bits = (tl.maximum(bits, offset) - offset) << 2
    return bits.to(tl.float32, bitcast=True) * (scale << _OCTAVE).to(tl.float32, bitcast=True)


@triton.jit
def decoded_signed(code, scale, offset: tl.constexpr):
    """Return the values of codes with signs."""
    values = decoded(tl.abs(code), scale, offset)
    return tl.where(code < 0, -values, values)


@triton.jit
def scale_of(values):
    """Return the scales of rows of values without signs, as a column."""
    # As integers, whose largest is a NaN's where there is one.
    scale = tl.max(values.to(tl.int32, bitcast=True), axis=1) >> _OCTAVE
    scale = scale + (scale > 0).to(tl.int32)
    return tl.where(scale > _LARGEST_SCALE, _NOT_FINITE, scale)[:, None]


@triton.jit
def coded(values, scale, added, offset: tl.constexpr, largest: tl.constexpr):
    """Return the codes of values without signs; ``added`` decides how they are rounded."""
    scaled = values * ((scale * -1 + _FACTOR) << _OCTAVE).to(tl.float32, bitcast=True)
    bits = (scaled.to(tl.int32, bitcast=True) >> 2) + offset
    return tl.minimum(bits.to(tl.float32, bitcast=True) + added, largest).to(tl.int32)


@triton.jit
def dither_of(at, shift):
    """Return the dither of elements by their place in a state."""
    spread = ((at.to(tl.uint32) & (_DITHERS - 1)) * _GOLDEN) >> _SPREAD
    return ((spread.to(tl.int32) + shift) & _DITHER_MASK).to(tl.float32) * _DITHER_STEP
