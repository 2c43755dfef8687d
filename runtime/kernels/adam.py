"""The Triton kernels that update by Adam: each operand is read and written once, states in 8 bits as they lie.

The arithmetic is that of torch's fused kernels, in float32; codes are those of ``state_codes``, bit for bit where
the values before coding are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.state_codes import BLOCK, SIGNED, UNSIGNED
from gascompile.runtime.kernels.updates import AdamOptions, Coded

_ELEMENTS = 1024
"""Per program: eight per thread of four warps, of each of the operands."""
_BLOCK = tl.constexpr(BLOCK)
_OCTAVE = tl.constexpr(state_codes.OCTAVE)
_LARGEST_SCALE = tl.constexpr(state_codes.LARGEST_SCALE)
_NOT_FINITE = tl.constexpr(state_codes.NOT_FINITE)
_FACTOR = tl.constexpr(state_codes.NOT_FINITE - 1)
_MEAN_OFFSET, _MEAN_LARGEST = tl.constexpr(SIGNED.offset), tl.constexpr(SIGNED.largest)
_SQUARE_OFFSET, _SQUARE_LARGEST = tl.constexpr(UNSIGNED.offset), tl.constexpr(UNSIGNED.largest)
_DITHERS = tl.constexpr(state_codes.DITHERS)
_GOLDEN = tl.constexpr(state_codes.GOLDEN)
_SPREAD = tl.constexpr(32 - state_codes.DITHER_BITS)
_DITHER_MASK = tl.constexpr((1 << state_codes.DITHER_BITS) - 1)
_DITHER_STEP = tl.constexpr(2.0**-state_codes.DITHER_BITS)


@triton.jit
def _updated(
    value,
    slope,
    mean,
    square,
    scale,
    lr_decay,
    weight_decay,
    rest1,
    beta2,
    rest2,
    step_size,
    root,
    eps,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
):
    """Return the parameter, the mean and the mean of squares after an update."""
    if scale is not None:
        slope = slope * tl.load(scale)
    if maximize:
        slope = -slope
    if decoupled:
        value = value - value * lr_decay
    else:
        slope = slope + value * weight_decay
    # From the nearer end, as torch interpolates.
    is_near = rest1 < 0.5
    mean = tl.where(is_near, mean, slope) + tl.where(is_near, rest1, rest1 - 1) * (slope - mean)
    square = beta2 * square + rest2 * slope * slope
    denominator = tl.div_rn(tl.sqrt_rn(square), root) + eps
    return value - tl.div_rn(step_size * mean, denominator), mean, square


@triton.jit
def _adam(
    parameter,
    gradient,
    mean,
    square,
    scale,
    count,
    lr_decay,
    weight_decay,
    rest1,
    beta2,
    rest2,
    step_size,
    root,
    eps,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = at < count
    value, first, second = _updated(
        tl.load(parameter + at, mask=inside, other=0.0),
        tl.load(gradient + at, mask=inside, other=0.0),
        tl.load(mean + at, mask=inside, other=0.0),
        tl.load(square + at, mask=inside, other=0.0),
        scale,
        lr_decay,
        weight_decay,
        rest1,
        beta2,
        rest2,
        step_size,
        root,
        eps,
        decoupled,
        maximize,
    )
    tl.store(parameter + at, value, mask=inside)
    tl.store(mean + at, first, mask=inside)
    tl.store(square + at, second, mask=inside)


@triton.jit
def _decoded(code, scale, offset: tl.constexpr):
    """Return the values of codes without signs."""
    bits = code.to(tl.float32).to(tl.int32, bitcast=True)
    bits = (tl.maximum(bits, offset) - offset) << 2
    return bits.to(tl.float32, bitcast=True) * (scale << _OCTAVE).to(tl.float32, bitcast=True)


@triton.jit
def _scale(values):
    """Return the scales of blocks of values without signs."""
    # As integers, whose largest is a NaN's where there is one.
    found = tl.max(values.to(tl.int32, bitcast=True), axis=1) >> _OCTAVE
    found = found + (found > 0).to(tl.int32)
    return tl.where(found > _LARGEST_SCALE, _NOT_FINITE, found)[:, None]


@triton.jit
def _coded(values, scale, added, offset: tl.constexpr, largest: tl.constexpr):
    scaled = values * ((scale * -1 + _FACTOR) << _OCTAVE).to(tl.float32, bitcast=True)
    bits = (scaled.to(tl.int32, bitcast=True) >> 2) + offset
    return tl.minimum(bits.to(tl.float32, bitcast=True) + added, largest).to(tl.int32)


@triton.jit
def _adam_coded(
    parameter,
    gradient,
    mean_codes,
    mean_scales,
    square_codes,
    square_scales,
    scale,
    count,
    blocks,
    dither_shift,
    lr_decay,
    weight_decay,
    rest1,
    beta2,
    rest2,
    step_size,
    root,
    eps,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    is_row = row < blocks
    at = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, is_code = at < count, is_row[:, None] & (at >= 0)
    code = tl.load(mean_codes.to(tl.pointer_type(tl.int8)) + at, mask=is_code, other=0)
    code = code.to(tl.int32)
    own = tl.load(mean_scales + row, mask=is_row, other=0).to(tl.int32)[:, None]
    mean = _decoded(tl.abs(code), own, _MEAN_OFFSET)
    mean = tl.where(code < 0, -mean, mean)
    code = tl.load(square_codes + at, mask=is_code, other=0).to(tl.int32)
    own = tl.load(square_scales + row, mask=is_row, other=0).to(tl.int32)[:, None]
    square = _decoded(code, own, _SQUARE_OFFSET)
    value, mean, square = _updated(
        tl.load(parameter + at, mask=inside, other=0.0),
        tl.load(gradient + at, mask=inside, other=0.0),
        mean,
        square,
        scale,
        lr_decay,
        weight_decay,
        rest1,
        beta2,
        rest2,
        step_size,
        root,
        eps,
        decoupled,
        maximize,
    )
    tl.store(parameter + at, value, mask=inside)
    is_negative = mean < 0
    mean = tl.abs(mean)
    own = _scale(mean)
    code = _coded(mean, own, 0.5, _MEAN_OFFSET, _MEAN_LARGEST)
    code = tl.where(is_negative, -code, code)
    tl.store(mean_codes + at, (code & 255).to(tl.uint8), mask=is_code)
    tl.store(mean_scales + row[:, None], own.to(tl.uint8), mask=is_row[:, None])
    square = tl.abs(square)
    own = _scale(square)
    spread = ((at.to(tl.uint32) & (_DITHERS - 1)) * _GOLDEN) >> _SPREAD
    added = ((spread.to(tl.int32) + dither_shift) & _DITHER_MASK).to(tl.float32) * _DITHER_STEP
    code = _coded(square, own, added, _SQUARE_OFFSET, _SQUARE_LARGEST)
    code = tl.maximum(code, (square > 0).to(tl.int32))
    tl.store(square_codes + at, code.to(tl.uint8), mask=is_code)
    tl.store(square_scales + row[:, None], own.to(tl.uint8), mask=is_row[:, None])


def adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    options: AdamOptions,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update as ``updates.adam`` says; operands are as it wants them, and not empty."""
    count = parameter.numel()
    with launch_device(parameter):
        _adam[(triton.cdiv(count, _ELEMENTS),)](
            parameter,
            gradient,
            mean,
            square,
            scale,
            count,
            *_scalars(options),
            options.decoupled,
            options.maximize,
            _ELEMENTS,
        )


def adam_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: tuple[Coded, Coded],
    options: AdamOptions,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update as ``updates.adam_coded`` says; operands are as it wants them, and not empty."""
    (mean_codes, mean_scales), (square_codes, square_scales) = states
    blocks = mean_scales.numel()
    block_rows = _ELEMENTS // BLOCK
    with launch_device(parameter):
        _adam_coded[(triton.cdiv(blocks, block_rows),)](
            parameter,
            gradient,
            mean_codes,
            mean_scales,
            square_codes,
            square_scales,
            scale,
            parameter.numel(),
            blocks,
            state_codes.dither_shift(options.step),
            *_scalars(options),
            options.decoupled,
            options.maximize,
            block_rows,
        )


def _scalars(options: AdamOptions) -> tuple[float, ...]:
    """Return the float32 arguments of the kernels, in their order; differences are taken in float64."""
    return (
        options.lr * options.weight_decay,
        options.weight_decay,
        1 - options.beta1,
        options.beta2,
        1 - options.beta2,
        options.step_size,
        options.root,
        options.eps,
    )
