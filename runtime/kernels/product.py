"""The Triton kernels that multiply 1 to 16 rows by a weight as it lies: packed or plain, read once.

Decoding is bound by the bytes of the weight, so a program owns a few outputs and walks along their rows. One
row of ``x`` is multiplied and added element by element, and summed up at the end. More rows are padded to 16
and go to the tensor cores with the weight as the left operand. Where too few programs came out to occupy the
GPU, the columns are divided among several, whose sums are added afterwards in a fixed order: the result does
not depend on who is faster.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gascompile.formats.layout import LOW_BITS, packed_parts
from gascompile.runtime.kernels.dequantise import int4_tile, signed_tile
from gascompile.runtime.kernels.launching import INTERPRETED, launch_device
from gascompile.runtime.kernels.rounding import rounded
from gascompile.runtime.kernels.tiling import PADDED_ROWS, Tiling, choose_tiling

_ADD_BLOCK = 256
"""Values per program of the sum of parts, which is bound by memory: two per thread. Not measured."""
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _store(total, bias, out, row, output, inside, outputs, rows, divided: tl.constexpr) -> None:
    """Write sums: to ``out`` with the bias, or without it to this part's own matrix in the workspace."""
    if divided:
        out += tl.program_id(1).to(tl.int64) * rows * outputs
    elif bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _one_row(
    x,
    weight,
    bias,
    out,
    outputs,
    columns,
    stride,
    part: tl.constexpr,
    divided: tl.constexpr,
    block_outputs: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    sums = tl.zeros((block_outputs, block_columns), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, columns)
    for step in range(0, part, block_columns):
        first = begin + step
        column = first + tl.arange(0, block_columns)
        mask = in_outputs[:, None] & (column < end)[None, :]
        tile = tl.load(weight + start[:, None] + column[None, :], mask=mask, other=0)
        factor = tl.load(x + column, mask=column < end, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * factor[None, :]
    total = tl.sum(sums, axis=1)
    _store(total, bias, out, 0, output, in_outputs, outputs, 1, divided)


@triton.jit
def _one_row_signed(
    x,
    weight,
    bias,
    out,
    outputs,
    columns,
    num_groups,
    stride,
    scales_offset,
    steps_offset,
    part: tl.constexpr,
    group: tl.constexpr,
    low_bits: tl.constexpr,
    divided: tl.constexpr,
    block_outputs: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    sums = tl.zeros((block_outputs, block_groups, group), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_groups)
    for step in range(0, part, block_groups):
        number = begin + step + tl.arange(0, block_groups)
        values = signed_tile(
            weight,
            start,
            in_outputs,
            number,
            end,
            columns,
            scales_offset,
            steps_offset,
            group,
            low_bits,
        )
        column = (number * group)[:, None] + tl.arange(0, group)[None, :]
        mask = (number < end)[:, None] & (column < columns)
        factor = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
        sums += values * factor[None, :, :]
    total = tl.sum(tl.sum(sums, axis=2), axis=1)
    _store(total, bias, out, 0, output, in_outputs, outputs, 1, divided)


@triton.jit
def _one_row_int4(
    x,
    weight,
    bias,
    out,
    outputs,
    num_groups,
    stride,
    scales_offset,
    minima_offset,
    part: tl.constexpr,
    group: tl.constexpr,
    divided: tl.constexpr,
    block_outputs: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    half: tl.constexpr = group // 2
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    sums = tl.zeros((block_outputs, block_groups, half), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_groups)
    for step in range(0, part, block_groups):
        number = begin + step + tl.arange(0, block_groups)
        even, odd = int4_tile(
            weight, start, in_outputs, number, end, scales_offset, minima_offset, group
        )
        column = (number * group)[:, None] + 2 * tl.arange(0, half)[None, :]
        mask = (number < end)[:, None]
        at_even = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
        at_odd = tl.load(x + column + 1, mask=mask, other=0.0).to(tl.float32)
        sums += even * at_even[None, :, :] + odd * at_odd[None, :, :]
    total = tl.sum(tl.sum(sums, axis=2), axis=1)
    _store(total, bias, out, 0, output, in_outputs, outputs, 1, divided)


@triton.jit
def _few_rows(
    x,
    weight,
    bias,
    out,
    outputs,
    rows,
    columns,
    x_stride,
    stride,
    part: tl.constexpr,
    divided: tl.constexpr,
    operand: tl.constexpr,
    padded_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    row = tl.arange(0, padded_rows)
    x_start = row.to(tl.int64) * x_stride
    sums = tl.zeros((block_outputs, padded_rows), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, columns)
    for step in range(0, part, block_columns):
        first = begin + step
        column = first + tl.arange(0, block_columns)
        mask = in_outputs[:, None] & (column < end)[None, :]
        tile = tl.load(weight + start[:, None] + column[None, :], mask=mask, other=0)
        mask = (row < rows)[None, :] & (column < end)[:, None]
        factor = tl.load(x + x_start[None, :] + column[:, None], mask=mask, other=0.0)
        sums = tl.dot(tile.to(operand), factor.to(operand), sums, input_precision="ieee")
    inside = in_outputs[:, None] & (row < rows)[None, :]
    _store(sums, bias, out, row[None, :], output[:, None], inside, outputs, rows, divided)


@triton.jit
def _dot(values, factor, sums, dtype: tl.constexpr):
    """Add ``values @ factor`` to ``sums``; what bfloat16 cannot hold of a value is multiplied on its own."""
    high = rounded(values, dtype)
    sums = tl.dot(high.to(factor.dtype), factor, sums, input_precision="ieee")
    if dtype == tl.bfloat16:
        low = rounded(values - high.to(tl.float32), dtype)
        sums = tl.dot(low.to(factor.dtype), factor, sums, input_precision="ieee")
    return sums


@triton.jit
def _few_rows_signed(
    x,
    weight,
    bias,
    out,
    outputs,
    rows,
    columns,
    num_groups,
    x_stride,
    stride,
    scales_offset,
    steps_offset,
    part: tl.constexpr,
    group: tl.constexpr,
    low_bits: tl.constexpr,
    divided: tl.constexpr,
    operand: tl.constexpr,
    padded_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    width: tl.constexpr = block_groups * group
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    row = tl.arange(0, padded_rows)
    x_start = row.to(tl.int64) * x_stride
    sums = tl.zeros((block_outputs, padded_rows), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_groups)
    for step in range(0, part, block_groups):
        first = begin + step
        values = signed_tile(
            weight,
            start,
            in_outputs,
            first + tl.arange(0, block_groups),
            end,
            columns,
            scales_offset,
            steps_offset,
            group,
            low_bits,
        )
        column = first * group + tl.arange(0, width)
        in_columns = (column < columns) & (column < end * group)
        mask = (row < rows)[None, :] & in_columns[:, None]
        factor = tl.load(x + x_start[None, :] + column[:, None], mask=mask, other=0.0)
        values = tl.reshape(values, (block_outputs, width))
        sums = _dot(values, factor.to(operand), sums, x.dtype.element_ty)
    inside = in_outputs[:, None] & (row < rows)[None, :]
    _store(sums, bias, out, row[None, :], output[:, None], inside, outputs, rows, divided)


@triton.jit
def _few_rows_int4(
    x,
    weight,
    bias,
    out,
    outputs,
    rows,
    num_groups,
    x_stride,
    stride,
    scales_offset,
    minima_offset,
    part: tl.constexpr,
    group: tl.constexpr,
    divided: tl.constexpr,
    operand: tl.constexpr,
    padded_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    width: tl.constexpr = block_groups * (group // 2)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = output < outputs
    start = output.to(tl.int64) * stride
    row = tl.arange(0, padded_rows)
    x_start = row.to(tl.int64) * x_stride
    sums = tl.zeros((block_outputs, padded_rows), dtype=tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_groups)
    for step in range(0, part, block_groups):
        first = begin + step
        number = first + tl.arange(0, block_groups)
        even, odd = int4_tile(
            weight, start, in_outputs, number, end, scales_offset, minima_offset, group
        )
        column = first * group + 2 * tl.arange(0, width)
        mask = (row < rows)[None, :] & (column < end * group)[:, None]
        where = x + x_start[None, :] + column[:, None]
        at_even = tl.load(where, mask=mask, other=0.0).to(operand)
        at_odd = tl.load(where + 1, mask=mask, other=0.0).to(operand)
        sums = _dot(tl.reshape(even, (block_outputs, width)), at_even, sums, x.dtype.element_ty)
        sums = _dot(tl.reshape(odd, (block_outputs, width)), at_odd, sums, x.dtype.element_ty)
    inside = in_outputs[:, None] & (row < rows)[None, :]
    _store(sums, bias, out, row[None, :], output[:, None], inside, outputs, rows, divided)


@triton.jit
def _add_parts(
    workspace, bias, out, size, outputs, parts: tl.constexpr, block: tl.constexpr
) -> None:
    """Add the parts of every element in their order, then the bias."""
    where = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(workspace + part * size + where, mask=where < size, other=0.0)
    if bias is not None:
        total += tl.load(bias + where % outputs, mask=where < size, other=0.0).to(tl.float32)
    tl.store(out + where, rounded(total, out.dtype.element_ty), mask=where < size)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    form: str | None,
    group: int,
) -> None:
    """Write the product to ``out``; all as ``checks.check_linear`` wants them, and ``out`` not empty.

    Where ``choose_tiling`` divides the columns, ``Tiling.workspace_bytes`` are allocated meanwhile.
    """
    rows, outputs = out.shape
    tiling = choose_tiling(rows, outputs, x.shape[1], form=form, group=group)
    divided = tiling.parts > 1
    target = x.new_empty((tiling.parts, rows, outputs), dtype=torch.float32) if divided else out
    blocks = (triton.cdiv(outputs, tiling.block_outputs), tiling.parts)
    with launch_device(out):
        kernel, arguments = _kernel_and_arguments(x, weight, tiling, form=form, group=group)
        kernel[blocks](x, weight, bias, target, outputs, divided=divided, **arguments)
        if divided:
            grid = (triton.cdiv(out.numel(), _ADD_BLOCK),)
            _add_parts[grid](target, bias, out, out.numel(), outputs, tiling.parts, _ADD_BLOCK)


def _kernel_and_arguments(
    x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, *, form: str | None, group: int
) -> tuple[Any, dict[str, Any]]:
    """Return which kernel multiplies, and what it is given beside the tensors."""
    rows, columns = x.shape
    parts = packed_parts(form, columns, group) if form is not None else None
    arguments: dict[str, Any] = {
        "block_outputs": tiling.block_outputs,
        "stride": weight.stride(0),
    }
    if rows > 1:
        arguments |= {"rows": rows, "x_stride": x.stride(0), "padded_rows": PADDED_ROWS}
        # The interpreter keeps bfloat16 as bits, which it would multiply as integers.
        arguments["operand"] = tl.float32 if INTERPRETED else _TRITON_DTYPES[x.dtype]
    if parts is None:
        arguments |= {"columns": columns, "part": tiling.part_columns}
        arguments["block_columns"] = tiling.block_columns
        return (_one_row if rows == 1 else _few_rows), arguments
    arguments |= {"scales_offset": parts.scales_offset, "num_groups": parts.num_scales}
    arguments |= {"group": group, "part": tiling.part_columns // group}
    arguments["block_groups"] = tiling.block_columns // group
    if form == "int4":
        arguments["minima_offset"] = parts.minima_offset
        return (_one_row_int4 if rows == 1 else _few_rows_int4), arguments
    assert form is not None, "packed parts are of a form"
    arguments |= {
        "steps_offset": parts.steps_offset,
        "low_bits": LOW_BITS[form],
        "columns": columns,
    }
    return (_one_row_signed if rows == 1 else _few_rows_signed), arguments
