"""The Triton kernels that update by Adam: each operand is read and written once, states in 8 bits as they lie.

The arithmetic is that of torch's fused kernels, in float32; codes are those of ``state_codes``, bit for bit where
the values before coding are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.coding import coded, decoded, decoded_signed, dither_of, scale_of
from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.state_codes import BLOCK, SIGNED, UNSIGNED
from gascompile.runtime.kernels.updates import AdamOptions, Coded

_ELEMENTS = 1024
"""Per program: eight per thread of four warps, of each of the operands."""
_BLOCK = tl.constexpr(BLOCK)
_MEAN_OFFSET, _MEAN_LARGEST = tl.constexpr(SIGNED.offset), tl.constexpr(SIGNED.largest)
_SQUARE_OFFSET, _SQUARE_LARGEST = tl.constexpr(UNSIGNED.offset), tl.constexpr(UNSIGNED.largest)


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
    own = tl.load(mean_scales + row, mask=is_row, other=0).to(tl.int32)[:, None]
    mean = decoded_signed(code.to(tl.int32), own, _MEAN_OFFSET)
    code = tl.load(square_codes + at, mask=is_code, other=0)
    own = tl.load(square_scales + row, mask=is_row, other=0).to(tl.int32)[:, None]
    square = decoded(code, own, _SQUARE_OFFSET)
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
    size = tl.abs(mean)
    own = scale_of(size)
    code = coded(size, own, 0.5, _MEAN_OFFSET, _MEAN_LARGEST)
    code = tl.where(mean < 0, -code, code)
    tl.store(mean_codes + at, (code & 255).to(tl.uint8), mask=is_code)
    tl.store(mean_scales + row[:, None], own.to(tl.uint8), mask=is_row[:, None])
    square = tl.abs(square)
    own = scale_of(square)
    code = coded(square, own, dither_of(at, dither_shift), _SQUARE_OFFSET, _SQUARE_LARGEST)
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
