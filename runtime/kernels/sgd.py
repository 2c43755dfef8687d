"""The Triton kernels that update by SGD, with and without momentum, which may be in 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.runtime.kernels.coding import coded, decoded_signed, scale_of
from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.state_codes import BLOCK, SIGNED
from gascompile.runtime.kernels.updates import Coded, SgdOptions

_ELEMENTS = 1024
"""Per program: eight per thread of four warps, of each of the operands."""
_BLOCK = tl.constexpr(BLOCK)
_OFFSET, _LARGEST = tl.constexpr(SIGNED.offset), tl.constexpr(SIGNED.largest)


@triton.jit
def _slope(value, slope, scale, weight_decay, maximize: tl.constexpr):
    """Return the gradient that counts."""
    if scale is not None:
        slope = slope * tl.load(scale)
    if maximize:
        slope = -slope
    return slope + value * weight_decay


@triton.jit
def _sgd(
    parameter,
    gradient,
    momentum,
    scale,
    count,
    lr,
    factor,
    rest,
    weight_decay,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    is_first: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = at < count
    value = tl.load(parameter + at, mask=inside, other=0.0)
    slope = tl.load(gradient + at, mask=inside, other=0.0)
    slope = _slope(value, slope, scale, weight_decay, maximize)
    if momentum is not None:
        kept = slope
        if not is_first:
            kept = tl.load(momentum + at, mask=inside, other=0.0) * factor + slope * rest
        tl.store(momentum + at, kept, mask=inside)
        if nesterov:
            kept = slope + kept * factor
        slope = kept
    tl.store(parameter + at, value - slope * lr, mask=inside)


@triton.jit
def _sgd_coded(
    parameter,
    gradient,
    codes,
    scales,
    scale,
    count,
    blocks,
    lr,
    factor,
    rest,
    weight_decay,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    is_first: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    is_row = row < blocks
    at = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, is_code = at < count, is_row[:, None] & (at >= 0)
    value = tl.load(parameter + at, mask=inside, other=0.0)
    slope = tl.load(gradient + at, mask=inside, other=0.0)
    slope = _slope(value, slope, scale, weight_decay, maximize)
    kept = slope
    if not is_first:
        code = tl.load(codes.to(tl.pointer_type(tl.int8)) + at, mask=is_code, other=0)
        own = tl.load(scales + row, mask=is_row, other=0).to(tl.int32)[:, None]
        kept = decoded_signed(code.to(tl.int32), own, _OFFSET) * factor + slope * rest
    taken = kept
    if nesterov:
        taken = slope + kept * factor
    tl.store(parameter + at, value - taken * lr, mask=inside)
    size = tl.abs(kept)
    own = scale_of(size)
    code = coded(size, own, 0.5, _OFFSET, _LARGEST)
    code = tl.where(kept < 0, -code, code)
    tl.store(codes + at, (code & 255).to(tl.uint8), mask=is_code)
    tl.store(scales + row[:, None], own.to(tl.uint8), mask=is_row[:, None])


def sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    options: SgdOptions,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update as ``updates.sgd`` says; operands are as it wants them, and not empty."""
    count = parameter.numel()
    with launch_device(parameter):
        _sgd[(triton.cdiv(count, _ELEMENTS),)](
            parameter,
            gradient,
            momentum,
            scale,
            count,
            *_scalars(options),
            options.nesterov,
            options.maximize,
            options.is_first,
            _ELEMENTS,
        )


def sgd_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: Coded,
    options: SgdOptions,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update as ``updates.sgd_coded`` says; operands are as it wants them, and not empty."""
    codes, scales = momentum
    block_rows = _ELEMENTS // BLOCK
    with launch_device(parameter):
        _sgd_coded[(triton.cdiv(len(scales), block_rows),)](
            parameter,
            gradient,
            codes,
            scales,
            scale,
            parameter.numel(),
            len(scales),
            *_scalars(options),
            options.nesterov,
            options.maximize,
            options.is_first,
            block_rows,
        )


def _scalars(options: SgdOptions) -> tuple[float, ...]:
    """Return the float32 arguments of the kernels, in their order."""
    return options.lr, options.momentum, 1 - options.dampening, options.weight_decay
