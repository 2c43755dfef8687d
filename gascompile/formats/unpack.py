"""Values of packed weights whose parts lie apart, in plain torch: some rows at a time, on any device."""

from __future__ import annotations

from typing import Final

import torch

from gascompile.formats.packings import WORD_BITS, Packing, Part, packing_of, rows_of

_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of ``awq`` each of its eight rows lies, in fours of bits."""
ROW_GROUP: Final = 16
"""Rows are taken in multiples of it, so that a word of zero points is never divided."""


def unpack_into(out: torch.Tensor, weight: torch.Tensor, form: str, begin: int) -> None:
    """Write the values of some rows into ``out``.

    Args:
        out: ``[some rows, columns]`` in float32, of any strides.
        weight: all bytes of the weight, in one dimension.
        form: of a packing.
        begin: the first row, a multiple of ``ROW_GROUP``.
    """
    packing = packing_of(form)
    assert packing is not None, f"{form} is a packing"
    num_rows, columns = out.shape
    whole = rows_of(form, columns, weight.numel())
    parts = {part.name: _view(weight, part) for part in packing.parts(whole, columns)}
    end = begin + num_rows
    _codes_into(out, parts["codes"], packing, begin, end)
    scales = _scales(parts["scales"], packing, begin, end)
    zeros = _zeros(parts.get("zeros"), packing, begin, end)
    groups = parts.get("groups")
    if isinstance(zeros, int):
        out.sub_(zeros) if zeros else None
    else:
        _combine(out, zeros, packing.group, groups, torch.Tensor.sub_)
    _combine(out, scales, packing.group, groups, torch.Tensor.mul_)


def _view(weight: torch.Tensor, part: Part) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, part.dtype)
    raw = weight[part.offset : part.offset + part.size_bytes]
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # of bytes that are scales: codes come first
    return raw.view(dtype).view(part.shape)


def _codes_into(
    out: torch.Tensor, codes: torch.Tensor, packing: Packing, begin: int, end: int
) -> None:
    each, mask = WORD_BITS // packing.bits, (1 << packing.bits) - 1
    if packing.kind == "fp8":
        _bytes_into(out, codes[begin:end])
    elif packing.kind == "gptq":
        words = codes[:, begin:end]
        places = out.t().unflatten(0, (-1, each))
        for place in range(each):
            places[:, place].copy_((words >> packing.bits * place).bitwise_and_(mask))
    elif packing.kind == "awq":
        words = codes[:, begin // each : end // each]
        places = out.t().unflatten(1, (-1, each))
        for row, place in enumerate(_PLACES):
            places[..., row].copy_((words >> packing.bits * place).bitwise_and_(mask))
    else:
        raw, columns = codes[begin:end].view(torch.uint8), out.shape[1]
        if packing.bits == 8:
            out.copy_(raw[:, :columns])
            return
        out[:, 0::2].copy_((raw & mask)[:, : -(-columns // 2)])
        out[:, 1::2].copy_((raw >> packing.bits)[:, : columns // 2])


def _bytes_into(out: torch.Tensor, codes: torch.Tensor) -> None:
    """Write fp8 as float32, by a table of all bytes: torch converts one by one. [Empirical] a third of the time."""
    if not out.is_contiguous():
        out.copy_(codes)
        return
    table = torch.arange(256, dtype=torch.uint8, device=out.device).view(codes.dtype).float()
    places = codes.view(torch.uint8).flatten().int()
    torch.index_select(table, 0, places, out=out.view(-1))


def _scales(scales: torch.Tensor, packing: Packing, begin: int, end: int) -> torch.Tensor:
    """Return the scales of some rows in float32, ``[rows, groups]``."""
    if packing.kind in ("gptq", "awq"):
        return scales[:, begin:end].float().t()
    if packing.kind == "packed" or packing.block_rows == 1:
        return scales[begin:end].float()
    if not packing.block_rows:
        return scales.float()
    first, last = begin // packing.block_rows, -(-end // packing.block_rows)
    rows = torch.arange(begin, end, device=scales.device)
    rows = rows.div_(packing.block_rows, rounding_mode="floor").sub_(first)
    return scales[first:last].float().index_select(0, rows)


def _zeros(
    zeros: torch.Tensor | None, packing: Packing, begin: int, end: int
) -> torch.Tensor | int:
    """Return the zero points of some rows in float32, ``[rows, groups]``, or the one of all."""
    if packing.kind == "fp8":
        return 0
    if zeros is None:
        return 1 << packing.bits - 1
    each, mask = WORD_BITS // packing.bits, (1 << packing.bits) - 1
    first, last = begin // each, -(-end // each)
    words = zeros[first:last].t() if packing.kind == "packed" else zeros[:, first:last]
    places = _PLACES if packing.kind == "awq" else range(each)
    shifts = torch.tensor(list(places), dtype=torch.int32, device=zeros.device) * packing.bits
    found = (words.unsqueeze(-1) >> shifts).bitwise_and_(mask)
    if packing.is_less_one:
        found.add_(1).bitwise_and_(mask)
    return found.flatten(1)[:, : end - begin].float().t()


def _combine(
    out: torch.Tensor,
    factors: torch.Tensor,
    group: int,
    groups: torch.Tensor | None,
    method: object,
) -> None:
    """Apply ``method`` in place to each value and its group's factor of ``[rows, groups]``."""
    assert callable(method)
    columns = out.shape[1]
    if groups is not None:
        # Laid out as `out` is where that has its rows beside each other.
        method(out, factors.t().index_select(0, groups).t())
        return
    whole = columns // group if group else 0
    if whole:
        method(out[:, : whole * group].unflatten(1, (whole, group)), factors[:, :whole, None])
    if not group or columns % group:
        method(out[:, whole * group :], factors[:, whole:])


def unpack_bytes(num_rows: int, columns: int, form: str) -> int:
    """Return at least what ``unpack_into`` allocates at once."""
    packing = packing_of(form)
    assert packing is not None, f"{form} is a packing"
    groups = packing.num_groups(columns)
    num_values = num_rows * columns
    if packing.kind == "fp8":
        # Scales of the blocks in float32, beside those of each row and which they are.
        return num_rows * (8 + 8 * groups) + 16 * groups + 4 * num_values + (4 << 10)
    codes_bytes = num_values if packing.kind == "packed" else 8 * num_values * packing.bits // 32
    # Zero points as numbers, in float32 and in the order of the rows; scales in float32.
    factors_bytes = (num_rows + ROW_GROUP) * groups * (4 + 4 + 4 + 4)
    spread_bytes = 4 * num_values if packing.is_ordered else 0
    return max(codes_bytes, factors_bytes + spread_bytes) + (4 << 10)
