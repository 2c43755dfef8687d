"""The Triton kernels that unpack int8 and int4 rows: the packed bytes are read once, in place.

The values equal those of ``reference`` bit for bit: products of values and scales are exact in float32, so
that a fused multiply-add rounds where the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.packing import packed_parts
from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.rounding import rounded

_BLOCK = 4096
_WIDEST = 1024


@triton.jit
def int8_tile(weight, start, in_rows, number, end, columns, scales_offset, group: tl.constexpr):
    """Return bytes and scales of some groups of some rows, ``[rows, groups, group]`` and ``[rows, groups]``."""
    column = (number * group)[:, None] + tl.arange(0, group)[None, :]
    mask = in_rows[:, None, None] & (column < columns)[None, :, :]
    values = weight.to(tl.pointer_type(tl.int8))
    where = start[:, None, None] + column[None, :, :]
    q = tl.load(values + where, mask=mask & (number < end)[None, :, None], other=0)
    where = weight + start[:, None] + scales_offset + 2 * number[None, :]
    inside = in_rows[:, None] & (number < end)[None, :]
    scale = tl.load(where.to(tl.pointer_type(tl.bfloat16)), mask=inside, other=0.0)
    return q.to(tl.float32), scale.to(tl.float32)


@triton.jit
def _unpack_int8(
    packed,
    out,
    rows,
    columns,
    num_groups,
    row_stride,
    scales_offset,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(num_groups, block_groups)
    pid = tl.program_id(0).to(tl.int64)
    row = (pid // num_blocks) * block_rows + tl.arange(0, block_rows)
    number = (pid % num_blocks) * block_groups + tl.arange(0, block_groups)
    in_rows = row < rows
    start = row * row_stride
    q, scale = int8_tile(packed, start, in_rows, number, num_groups, columns, scales_offset, group)
    column = (number * group)[:, None] + tl.arange(0, group)[None, :]
    inside = in_rows[:, None, None] & (column < columns)[None, :, :]
    where = out + (row * columns)[:, None, None] + column[None, :, :]
    tl.store(where, rounded(q * scale[:, :, None], out.dtype.element_ty), mask=inside)


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
    half: tl.constexpr = group // 2
    num_blocks = tl.cdiv(num_groups, block_groups)
    pid = tl.program_id(0).to(tl.int64)
    row = (pid // num_blocks) * block_rows + tl.arange(0, block_rows)
    number = (pid % num_blocks) * block_groups + tl.arange(0, block_groups)
    inside = (row < rows)[:, None] & (number < num_groups)[None, :]
    start = row * row_stride
    first = start[:, None] + number[None, :] * half
    where = first[:, :, None] + tl.arange(0, half)[None, None, :]
    both = tl.load(packed + where, mask=inside[:, :, None], other=0)
    scales = (packed + start[:, None] + scales_offset + 2 * number[None, :]).to(
        tl.pointer_type(tl.float16)
    )
    minima = (packed + start[:, None] + minima_offset + 2 * number[None, :]).to(
        tl.pointer_type(tl.float16)
    )
    scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    minimum = tl.load(minima, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    even = (both & 15).to(tl.float32) * scale + minimum
    odd = (both >> 4).to(tl.float32) * scale + minimum
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
        if form == "int8":
            _unpack_int8[grid](
                packed, out, rows, columns, parts.num_scales, stride, scales, *blocks
            )
        else:
            _unpack_int4[grid](
                packed, out, rows, parts.num_scales, stride, scales, parts.minima_offset, *blocks
            )
