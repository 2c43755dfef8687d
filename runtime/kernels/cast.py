"""The Triton kernel that copies out of staging and casts on the way: one read and one write per element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gascompile.runtime.kernels.launching import launch_device
from gascompile.runtime.kernels.rounding import rounded

_BLOCK = 4096
"""Elements per program: 32 per thread of four warps, so that several wide loads are under way at once."""
_WIDEST = 2048
"""Columns of a program where there are several rows: half a block, so that it has two rows. Not measured."""


@triton.jit
def _cast(
    source,
    out,
    rows,
    columns,
    row_stride,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(columns, block_columns)
    pid = tl.program_id(0).to(tl.int64)
    row = (pid // num_blocks) * block_rows + tl.arange(0, block_rows)
    column = (pid % num_blocks) * block_columns + tl.arange(0, block_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(source + row[:, None] * row_stride + column[None, :], mask=inside)
    where = out + row[:, None] * columns + column[None, :]
    tl.store(where, rounded(values, out.dtype.element_ty), mask=inside)


def cast_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``source`` to ``out``; both as ``checks.check_cast`` wants them, and not empty."""
    if source.is_contiguous():
        rows, columns, row_stride = 1, source.numel(), source.numel()
    else:
        (rows, columns), row_stride = source.shape, source.stride(0)
    block_columns = min(triton.next_power_of_2(columns), _WIDEST if rows > 1 else _BLOCK)
    block_rows = min(triton.next_power_of_2(rows), max(1, _BLOCK // block_columns))
    grid = (triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),)
    with launch_device(out):
        _cast[grid](source, out, rows, columns, row_stride, block_rows, block_columns)
