"""Where the values, scales and minima of a row-packed weight lie: pure arithmetic, shared by all who touch one.

A packed weight is one matrix of bytes, ``[rows, row_bytes]``. A row holds all that its values need, so that
a range of rows, or a single one, is a range of bytes like that of any weight.

``int8``
    The row's values as signed bytes, a zero where they are odd, then one bfloat16 scale per group of columns.
    A value is ``q * scale``, with ``q`` from -127 to 127.
``int4``
    Two values a byte, the even column in the low four bits, as unsigned numbers 0 to 15; then one float16
    scale per group of columns, then one float16 minimum per group. A value is ``q * scale + minimum``.

Zeros fill every row up to a multiple of ``ROW_ALIGNMENT``, so that rows start where wide loads may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

LAYOUT = 2
"""Of the rows: weights packed in another one are packed again."""
FORMS = ("int8", "int4")
"""The forms that are row-packed; every other form is a plain matrix of its dtype."""
GROUPS = (32, 64, 128)
"""How many columns may share a scale, and in ``int4`` a minimum."""
DEFAULT_GROUPS: Final[Mapping[str, int]] = MappingProxyType({"int8": 64, "int4": 32})
"""Groups that weights are packed in: halving them takes as many bits more as it makes values finer."""
ROW_ALIGNMENT = 16
"""Bytes; the length of every row is a multiple of it."""
INT8_LARGEST = 127
INT4_LARGEST = 15
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one packed row is made of; offsets are in bytes from the row's start."""

    values_bytes: int
    """Bytes that hold values; they start at offset 0."""
    scales_offset: int
    num_scales: int
    minima_offset: int | None
    """Where as many minima as there are scales begin; ``None`` for ``int8``, which has none."""
    used_bytes: int
    """Everything before the zeros at the end."""
    row_bytes: int


def packed_parts(form: str, columns: int, group: int) -> Parts:
    """Return the layout of one row of ``columns`` values.

    Args:
        form: one of ``FORMS``.
        columns: values in a row, at least 1; for ``int4`` a multiple of ``group``. The last group of ``int8``
            may be shorter.
        group: one of ``GROUPS``.

    Raises:
        ValueError: an unknown form, no columns, or a group that is unknown or does not divide the columns.
    """
    _check(form, columns, group)
    num_scales = -(-columns // group)
    values_bytes = columns if form == "int8" else columns // 2
    scales_offset = _round_up(values_bytes, _SCALE_BYTES)
    end = scales_offset + num_scales * _SCALE_BYTES
    minima_offset = end if form == "int4" else None
    if minima_offset is not None:
        end += num_scales * _SCALE_BYTES
    return Parts(
        values_bytes=values_bytes,
        scales_offset=scales_offset,
        num_scales=num_scales,
        minima_offset=minima_offset,
        used_bytes=end,
        row_bytes=_round_up(end, ROW_ALIGNMENT),
    )


def row_bytes(form: str, columns: int, group: int) -> int:
    """Return the bytes from the start of one packed row to the start of the next.

    Raises:
        ValueError: as ``packed_parts`` does.
    """
    return packed_parts(form, columns, group).row_bytes


def _check(form: str, columns: int, group: int) -> None:
    if form not in FORMS:
        raise ValueError(f"'{form}' is no packed form; packed forms are {', '.join(FORMS)}")
    if columns < 1:
        raise ValueError(f"a packed row needs at least 1 column, not {columns}")
    if group not in GROUPS:
        known = ", ".join(str(size) for size in GROUPS)
        raise ValueError(f"{form} knows groups of {known} columns, not of {group}")
    if form == "int4" and columns % group:
        raise ValueError(
            f"int4 needs columns that its group divides: {columns} columns leave {columns % group} beyond groups of "
            f"{group}; take a smaller group or int8"
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
