"""Values of packed weights whose parts lie apart, in plain torch: some rows at a time, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch

from gascompile.formats.packings import WORD_BITS, Packing, PackingPart, packing_of, rows_of

_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of ``awq`` each of its eight rows lies, in fours of bits."""
ROW_GROUP: Final = 16
"""Rows are taken in multiples of it, so that a word of zero points is never divided."""


class Unpack(Protocol):
    """Compiled code that writes values; says whether shapes were for it."""

    def __call__(
        self,
        out: torch.Tensor,
        codes: torch.Tensor,
        zeros: torch.Tensor | int,
        scales: torch.Tensor,
        groups: torch.Tensor | None,
        packing: Packing,
    ) -> bool:
        """Write ``(code - zero) * scale`` into ``out``, ``[rows, columns]``; factors are ``[rows, groups]``."""
        ...


def unpacked(
    weight: torch.Tensor, form: str, columns: int, step: int, native: Unpack | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ranges of rows with their values, ``[step, columns]`` in float32, in one piece of memory."""
    rows = rows_of(form, columns, weight.numel())
    # Codes that follow each other along the rows are written so, too.
    is_across = form.startswith(("gptq", "awq"))
    size = (columns, step) if is_across else (step, columns)
    scratch = torch.empty(size, device=weight.device)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        block = scratch[:, : end - begin].t() if is_across else scratch[: end - begin]
        unpack_into(block, weight, form, begin, native)
        yield begin, end, block


def unpack_into(
    out: torch.Tensor, weight: torch.Tensor, form: str, begin: int, native: Unpack | None = None
) -> None:
    """Write the values of some rows into ``out``.

    Args:
        out: ``[some rows, columns]`` in float32, of any strides.
        weight: all bytes of the weight, in one dimension.
        form: of a packing.
        begin: the first row, a multiple of ``ROW_GROUP``.
        native: does it where it can.
    """
    packing = packing_of(form)
    assert packing is not None, f"{form} is a packing"
    num_rows, columns = out.shape
    whole = rows_of(form, columns, weight.numel())
    parts = {part.name: part for part in packing.parts(whole, columns)}
    end = begin + num_rows
    codes = _codes(weight, parts["codes"], packing, begin, end)
    scales = _scales(weight, parts["scales"], packing, begin, end)
    zeros = _zeros(weight, parts.get("zeros"), packing, begin, end)
    groups = _rows(weight, parts["groups"], 0, columns) if "groups" in parts else None
    if native is not None and native(out, codes, zeros, scales, groups, packing):
        return
    _codes_into(out, codes, packing)
    if isinstance(zeros, int):
        out.sub_(zeros) if zeros else None
    else:
        _combine(out, zeros, packing.group, groups, torch.Tensor.sub_)
    _combine(out, scales, packing.group, groups, torch.Tensor.mul_)


def _rows(weight: torch.Tensor, part: PackingPart, begin: int, end: int) -> torch.Tensor:
    """Return rows of a part; of one that is not aligned a copy."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    row_bytes = part.size_bytes // part.shape[0]
    raw = weight[part.offset + begin * row_bytes : part.offset + end * row_bytes]
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(-1, *part.shape[1:])


def _codes(
    weight: torch.Tensor, part: PackingPart, packing: Packing, begin: int, end: int
) -> torch.Tensor:
    """Return the codes of some rows: words where they follow each other along the rows, else rows of bytes."""
    if packing.kind == "fp8":
        return _rows(weight, part, begin, end)
    if packing.kind == "packed":
        row_bytes = part.size_bytes // part.shape[0]
        raw = weight[part.offset + begin * row_bytes : part.offset + end * row_bytes]
        return raw.view(-1, row_bytes)
    words = _rows(weight, part, 0, part.shape[0])
    each = WORD_BITS // packing.bits if packing.kind == "awq" else 1
    return words[:, begin // each : end // each]


def _codes_into(out: torch.Tensor, codes: torch.Tensor, packing: Packing) -> None:
    each, mask = WORD_BITS // packing.bits, (1 << packing.bits) - 1
    if packing.kind == "fp8":
        _bytes_into(out, codes)
    elif packing.kind == "gptq":
        places = out.t().unflatten(0, (-1, each))
        for place in range(each):
            places[:, place].copy_((codes >> packing.bits * place).bitwise_and_(mask))
    elif packing.kind == "awq":
        places = out.t().unflatten(1, (-1, each))
        for row, place in enumerate(_PLACES):
            places[..., row].copy_((codes >> packing.bits * place).bitwise_and_(mask))
    elif packing.bits == 8:
        out.copy_(codes[:, : out.shape[1]])
    else:
        columns = out.shape[1]
        out[:, 0::2].copy_((codes & mask)[:, : -(-columns // 2)])
        out[:, 1::2].copy_((codes >> packing.bits)[:, : columns // 2])


def _bytes_into(out: torch.Tensor, codes: torch.Tensor) -> None:
    """Write fp8 as float32, by a table of all bytes: torch converts one by one. [Empirical] a third of the time."""
    if not out.is_contiguous():
        out.copy_(codes)
        return
    table = fp8_table(out.device)
    places = codes.view(torch.uint8).flatten().int()
    torch.index_select(table, 0, places, out=out.view(-1))


def fp8_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return what each byte is as E4M3, in float32."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    return every.view(torch.float8_e4m3fn).float()


def _scales(
    weight: torch.Tensor, part: PackingPart, packing: Packing, begin: int, end: int
) -> torch.Tensor:
    """Return the scales of some rows in float32, ``[rows, groups]``."""
    if packing.kind in ("gptq", "awq"):
        return _rows(weight, part, 0, part.shape[0])[:, begin:end].float().t()
    size = packing.block_rows if packing.kind == "fp8" else 1
    if size == 1:
        return _rows(weight, part, begin, end).float()
    if not size:
        return _rows(weight, part, 0, 1).float()
    first, last = begin // size, -(-end // size)
    rows = torch.arange(begin, end, device=weight.device)
    rows = rows.div_(size, rounding_mode="floor").sub_(first)
    return _rows(weight, part, first, last).float().index_select(0, rows)


def _zeros(
    weight: torch.Tensor, part: PackingPart | None, packing: Packing, begin: int, end: int
) -> torch.Tensor | int:
    """Return the zero points of some rows in float32, ``[rows, groups]``, or the one of all."""
    if packing.kind == "fp8":
        return 0
    if part is None:
        return 1 << packing.bits - 1
    each, mask = WORD_BITS // packing.bits, (1 << packing.bits) - 1
    first, last = begin // each, -(-end // each)
    if packing.kind == "packed":
        words = _rows(weight, part, first, last).t()
    else:
        words = _rows(weight, part, 0, part.shape[0])[:, first:last]
    places = _PLACES if packing.kind == "awq" else range(each)
    shifts = torch.tensor(list(places), dtype=torch.int32, device=weight.device) * packing.bits
    zeros = (words.unsqueeze(-1) >> shifts).bitwise_and_(mask)
    if packing.is_less_one:
        zeros.add_(1).bitwise_and_(mask)
    return zeros.flatten(1)[:, : end - begin].float().t()


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
        return num_rows * (8 + 12 * groups) + 16 * groups + 4 * num_values + (4 << 10)
    codes_bytes = num_values if packing.kind == "packed" else 8 * num_values * packing.bits // 32
    # Zero points as words, numbers, in float32 and in order; scales as they lie and in float32.
    factors_bytes = (num_rows + ROW_GROUP) * groups * (4 + 4 + 4 + 4 + 4 + 4)
    spread_bytes = 4 * num_values if packing.is_ordered else 0
    return max(codes_bytes, factors_bytes + spread_bytes) + (4 << 10)
