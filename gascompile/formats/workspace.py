"""Bounds, whatever the values, of the bytes that ops on weights in their transfer format take beside results."""

from __future__ import annotations

import torch

from gascompile.formats.blocks import decode_bytes
from gascompile.formats.layout import BLOCKS, GROUPS_PER_STEP, PACKED_FORMS, packed_parts
from gascompile.formats.ops import block_rows, transfer_rows
from gascompile.formats.packings import packing_of
from gascompile.formats.unpack import unpack_bytes

_FEW_BYTES = 1 << 10
"""Allocations of a few bytes: sizes are rounded up."""


def linear_workspace_bytes(x: torch.Tensor, weight: torch.Tensor, form: str, group: int) -> int:
    """Return at least what ``wire_linear`` allocates at once beside its result."""
    columns, itemsize = x.shape[-1], x.element_size()
    m = x.numel() // columns
    block = block_rows(m, columns, transfer_rows(weight, form, columns))
    size_bytes = block * columns * itemsize + _FEW_BYTES
    if not x.is_contiguous():
        size_bytes += m * columns * itemsize
    if packing_of(form) is not None:
        size_bytes += (4 + itemsize) * block * columns if x.dtype != torch.float32 else 0
        return size_bytes + unpack_bytes(block, columns, form)
    if form not in PACKED_FORMS:
        return size_bytes
    num_scales = block * -(-columns // group)
    if x.dtype != torch.float32:
        decoding_bytes = decode_workspace_bytes(block, columns, form, group)
        return size_bytes + decoding_bytes + 4 * block * columns
    if form != "int4":
        return size_bytes + decode_workspace_bytes(block, columns, form, group)
    # Scales in float32, and minima in both dtypes.
    size_bytes += num_scales * (4 + 2 + 4) + block * columns // 2
    size_bytes += m * columns * itemsize + m * (columns // group) * itemsize
    return size_bytes


def decode_workspace_bytes(
    num_rows: int, columns: int, form: str, group: int, dtype_bytes: int = 4
) -> int:
    """Return at least what decoding rows in a transfer format allocates at once beside its result."""
    if packing_of(form) is not None:
        block = block_rows(1, columns, num_rows)
        narrow_bytes = dtype_bytes * block * columns if dtype_bytes != 4 else 0
        return _FEW_BYTES + 4 * block * columns + narrow_bytes + unpack_bytes(block, columns, form)
    if form not in PACKED_FORMS:
        return _FEW_BYTES
    if form in BLOCKS:
        plain_bytes = decode_bytes(num_rows, columns, form)
        return _FEW_BYTES + plain_bytes + (4 * num_rows * columns if dtype_bytes != 4 else 0)
    parts = packed_parts(form, columns, group)
    row_bytes = columns // 2 + parts.num_scales * (2 + 4)
    if form != "int4":
        # Codes twice, scales and steps in float32, lower bits as bytes and in float32.
        row_bytes = parts.num_scales + 2 + parts.num_steps * (4 * GROUPS_PER_STEP + 2 + 4)
        row_bytes += parts.low_bytes * (1 + 4)
    if dtype_bytes != 4:
        row_bytes += 4 * columns
    return _FEW_BYTES + num_rows * row_bytes
