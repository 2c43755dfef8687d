"""The Triton kernels that unpack packed rows: the packed bytes are read once, in place.

The values equal those of ``reference`` bit for bit: products of values and scales are exact in float32, so
that a fused multiply-add rounds where the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.formats import layout as packing
from gascompile.formats.layout import LOW_BITS, packed_parts
from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.rounding import rounded

_BLOCK = 4096
"""Values per program: 32 per thread of four warps."""
_WIDEST = 1024
"""Columns of a program: a quarter of a block, so that narrow matrices fill one, too. Not measured."""
_GROUPS_PER_STEP = tl.constexpr(packing.GROUPS_PER_STEP)


@triton.jit
def _scales(weight, start, inside, number, scales_offset, steps_offset):
    """Return the scales of some groups of some rows, ``[rows, groups]``: codes of four bits times their steps."""
    where = weight + start[:, None]
    pair = tl.load(where + scales_offset + (number // 2)[None, :], mask=inside, other=0)
    code = (pair.to(tl.int32) >> (number % 2 * 4).to(tl.int32)[None, :]) & 15
    steps = where + steps_offset + 2 * (number // _GROUPS_PER_STEP)[None, :]
    step = tl.load(steps.to(tl.pointer_type(tl.bfloat16)), mask=inside, other=0.0)
    return code.to(tl.float32) * step.to(tl.float32)


@triton.jit
def signed_tile(
    weight,
    start,
    in_rows,
    number,
    end,
    columns,
    scales_offset,
    steps_offset,
    group: tl.constexpr,
    low_bits: tl.constexpr,
):
    """Return the values of some groups of some rows, ``[rows, groups, group]``, with zeros beyond ``end``."""
    column = (number * group)[:, None] + tl.arange(0, group)[None, :]
    in_columns = (column < columns) & (number < end)[:, None]
    mask = in_rows[:, None, None] & in_columns[None, :, :]
    where = weight + start[:, None, None]
    upper = (where + column[None, :, :]).to(tl.pointer_type(tl.int8))
    q = tl.load(upper, mask=mask, other=0).to(tl.float32)
    if low_bits > 0:
        low_bytes = (columns * low_bits + 7) // 8
        plane = where + columns + (column % low_bytes)[None, :, :]
        low = tl.load(plane, mask=mask, other=0).to(tl.int32)
        shift = (column // low_bytes * low_bits).to(tl.int32)[None, :, :]
        q = q * (1 << low_bits) + ((low >> shift) & ((1 << low_bits) - 1)).to(tl.float32)
    inside = in_rows[:, None] & (number < end)[None, :]
    scale = _scales(weight, start, inside, number, scales_offset, steps_offset)
    return q * scale[:, :, None]


@triton.jit
def int4_tile(
    weight, start, in_outputs, number, end, scales_offset, minima_offset, group: tl.constexpr
):
    """Return the even and the odd values of some groups of some outputs, ``[outputs, groups, group / 2]``."""
    half: tl.constexpr = group // 2
    inside = in_outputs[:, None] & (number < end)[None, :]
    where = (start[:, None] + number[None, :] * half)[:, :, None]
    both = tl.load(
        weight + where + tl.arange(0, half)[None, None, :], mask=inside[:, :, None], other=0
    )
    scales = (weight + start[:, None] + scales_offset + 2 * number[None, :]).to(
        tl.pointer_type(tl.float16)
    )
    minima = (weight + start[:, None] + minima_offset + 2 * number[None, :]).to(
        tl.pointer_type(tl.float16)
    )
    scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    minimum = tl.load(minima, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    return (both & 15).to(tl.float32) * scale + minimum, (both >> 4).to(
        tl.float32
    ) * scale + minimum


@triton.jit
def _unpack_signed(
    packed,
    out,
    rows,
    columns,
    num_groups,
    row_stride,
    scales_offset,
    steps_offset,
    group: tl.constexpr,
    low_bits: tl.constexpr,
    block_rows: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(num_groups, block_groups)
    pid = tl.program_id(0).to(tl.int64)
    row = (pid // num_blocks) * block_rows + tl.arange(0, block_rows)
    number = (pid % num_blocks) * block_groups + tl.arange(0, block_groups)
    in_rows = row < rows
    start = row * row_stride
    values = signed_tile(
        packed,
        start,
        in_rows,
        number,
        num_groups,
        columns,
        scales_offset,
        steps_offset,
        group,
        low_bits,
    )
    column = (number * group)[:, None] + tl.arange(0, group)[None, :]
    inside = in_rows[:, None, None] & (column < columns)[None, :, :]
    where = out + (row * columns)[:, None, None] + column[None, :, :]
    tl.store(where, rounded(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_int4(
    packed,
    out,
    rows,
    num_groups,
    row_stride,
    scales_offset,
    minima_offset,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(num_groups, block_groups)
    pid = tl.program_id(0).to(tl.int64)
    row = (pid // num_blocks) * block_rows + tl.arange(0, block_rows)
    number = (pid % num_blocks) * block_groups + tl.arange(0, block_groups)
    in_rows = row < rows
    inside = in_rows[:, None] & (number < num_groups)[None, :]
    even, odd = int4_tile(
        packed, row * row_stride, in_rows, number, num_groups, scales_offset, minima_offset, group
    )
    result = rounded(tl.interleave(even, odd), out.dtype.element_ty)
    first = row[:, None] * (num_groups * group) + number[None, :] * group
    where = first[:, :, None] + tl.arange(0, group)[None, None, :]
    tl.store(out + where, result, mask=inside[:, :, None])


def unpack(packed: torch.Tensor, out: torch.Tensor, *, form: str, group: int) -> None:
    """Write the values of ``packed`` to ``out``; both as ``checks.check_unpack`` wants them, and not empty."""
    rows, columns = out.shape
    parts = packed_parts(form, columns, group)
    block_columns = group * min(triton.next_power_of_2(parts.num_scales), _WIDEST // group)
    block_rows = min(triton.next_power_of_2(rows), max(1, _BLOCK // block_columns))
    grid = (triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),)
    stride, scales = packed.stride(0), parts.scales_offset
    with launch_device(out):
        blocks = (group, block_rows, block_columns // group)
        if form != "int4":
            steps, low_bits = parts.steps_offset, LOW_BITS[form]
            shape = (rows, columns, parts.num_scales, stride, scales, steps)
            _unpack_signed[grid](packed, out, *shape, group, low_bits, *blocks[1:])
        else:
            _unpack_int4[grid](
                packed, out, rows, parts.num_scales, stride, scales, parts.minima_offset, *blocks
            )
