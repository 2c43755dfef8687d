"""Where the values, scales and minima of a row-packed weight lie: pure arithmetic, shared by all who touch one.

A packed weight is one matrix of bytes, ``[rows, row_bytes]``. A row holds all that its values need, so that
a range of rows, or a single one, is a range of bytes like that of any weight.

``int8``, ``int9``, ``int10``, ``int12``
    A value is ``q * (step * code)``: ``q`` a signed number of so many bits, ``code`` four bits per group of columns,
    ``step`` a bfloat16 per ``GROUPS_PER_STEP`` groups. Such products are exact in float32. First come the upper
    eight bits of every ``q`` as signed bytes; then the lower ones, if any, in planes: of ``low_bytes`` bytes, byte
    ``i`` holds those of the columns ``i``, ``i + low_bytes`` and so on, the first in its lowest bits. Then the codes,
    two a byte, the even group in the low four bits; then, at an even address, the steps.
``int4``
    Two values a byte, the even column in the low four bits, as unsigned numbers 0 to 15; then one float16
    scale per group of columns, then one float16 minimum per group. A value is ``q * scale + minimum``.

Zeros fill every row up to a multiple of ``ROW_ALIGNMENT``, so that rows start where wide loads may.

``q8_0``, ``q4_0``, ``q4_k``, ``q6_k``
    What llama.cpp's files hold, byte for byte: blocks of so many values one after the other, each with its
    scales. Nothing is packed in these here. ``formats.blocks`` says what is in a block.

What quantised safetensors hold has no packed rows: ``formats.packings`` says how its parts lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gascompile.formats.packings import packing_of

LAYOUT = 3
"""Of the rows: weights packed in another one are packed again."""
LOW_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {"int8": 0, "int9": 1, "int10": 2, "int12": 4}
)
"""Forms of signed numbers, and how many bits of these lie beside the upper eight."""
FORMS = (*LOW_BITS, "int4")
"""The forms that weights are packed in here."""
BLOCKS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"q8_0": (32, 34), "q4_0": (32, 18), "q4_k": (256, 144), "q6_k": (256, 210)}
)
"""Forms that files are read in: values of a block, and its bytes."""
PACKED_FORMS = (*FORMS, *BLOCKS)
"""The forms whose rows are bytes. Those of ``packings`` are bytes as a whole, every other is a plain matrix."""
GROUPS = (16, 32, 64, 128)
"""How many columns may share a scale, and in ``int4`` a minimum."""
DEFAULT_GROUPS: Final[Mapping[str, int]] = MappingProxyType(
    {**dict.fromkeys(LOW_BITS, 16), "int4": 32}
)
"""Groups that weights are packed in: halving them takes as many bits more as it makes values finer."""
ROW_ALIGNMENT = 16
"""Bytes; the length of every row is a multiple of it."""
INT4_LARGEST = 15  # four bits
LARGEST_CODE = 15  # of a scale: four bits
GROUPS_PER_STEP = 16  # scales that share a step: 1 more bit per scale
_HALF_BYTES = 2  # of float16 and bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one packed row is made of; offsets are in bytes from the row's start."""

    values_bytes: int
    """Bytes that hold values, or the upper eight bits of each; they start at offset 0."""
    low_bytes: int
    """Bytes of the lower bits, which follow."""
    scales_offset: int
    """Where the scales begin, or their codes."""
    num_scales: int
    minima_offset: int | None
    """Where as many minima as there are scales begin; ``None`` for other forms than ``int4``."""
    steps_offset: int | None
    """Where the steps begin that the codes count; ``None`` for ``int4``."""
    num_steps: int
    used_bytes: int
    """Everything before the zeros at the end."""
    row_bytes: int


def packed_parts(form: str, columns: int, group: int) -> Parts:
    """Return the layout of one row of ``columns`` values.

    Args:
        form: one of ``FORMS``.
        columns: values in a row, at least 1; for ``int4`` a multiple of ``group``. The last group of other forms
            may be shorter.
        group: one of ``GROUPS``.

    Raises:
        ValueError: an unknown form, no columns, or a group that is unknown or does not divide the columns.
    """
    _check(form, columns, group)
    num_scales = -(-columns // group)
    if form == "int4":
        scales_offset = columns // 2
        minima_offset = scales_offset + num_scales * _HALF_BYTES
        used_bytes = minima_offset + num_scales * _HALF_BYTES
        return Parts(
            values_bytes=columns // 2,
            low_bytes=0,
            scales_offset=scales_offset,
            num_scales=num_scales,
            minima_offset=minima_offset,
            steps_offset=None,
            num_steps=0,
            used_bytes=used_bytes,
            row_bytes=_round_up(used_bytes, ROW_ALIGNMENT),
        )
    low_bytes = -(-columns * LOW_BITS[form] // 8)
    scales_offset = columns + low_bytes
    steps_offset = _round_up(scales_offset + -(-num_scales // 2), _HALF_BYTES)
    num_steps = -(-num_scales // GROUPS_PER_STEP)
    used_bytes = steps_offset + num_steps * _HALF_BYTES
    return Parts(
        values_bytes=columns,
        low_bytes=low_bytes,
        scales_offset=scales_offset,
        num_scales=num_scales,
        minima_offset=None,
        steps_offset=steps_offset,
        num_steps=num_steps,
        used_bytes=used_bytes,
        row_bytes=_round_up(used_bytes, ROW_ALIGNMENT),
    )


def is_packed(form: str) -> bool:
    """Return whether a weight in this form moves as bytes that have to be decoded."""
    return form in PACKED_FORMS or packing_of(form) is not None


def is_read_packed(form: str) -> bool:
    """Return whether files hold weights in this form, which are read in place and packed nowhere here."""
    return form in BLOCKS or packing_of(form) is not None


def group_of(form: str) -> int:
    """Return how many columns share a scale, or a block, in a packed form; 0 in others."""
    if packing := packing_of(form):
        return packing.group
    return BLOCKS[form][0] if form in BLOCKS else DEFAULT_GROUPS.get(form, 0)


def largest_value(form: str) -> int:
    """Return the largest ``q`` of a form of signed numbers; the smallest is its negative."""
    return (1 << 7 + LOW_BITS[form]) - 1


def row_bytes(form: str, columns: int, group: int) -> int:
    """Return the bytes from the start of one packed row to the start of the next.

    Raises:
        ValueError: as ``packed_parts`` does; or blocks do not divide the columns.
    """
    if form in BLOCKS:
        num_values, block_bytes = BLOCKS[form]
        if columns < 1 or columns % num_values:
            raise ValueError(
                f"{form} has blocks of {num_values} values, which {columns} columns are not made of"
            )
        return columns // num_values * block_bytes
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
