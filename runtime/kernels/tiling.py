"""How a product with few rows is divided among programs: arithmetic on shapes, so that equal shapes run equally."""

from __future__ import annotations

from dataclasses import dataclass

PADDED_ROWS = 16
"""Rows that the tensor cores take at least; fewer are padded with zeros."""
TARGET_PROGRAMS = 264
"""Two per multiprocessor of an H100 or H200, which have 132. Chosen by counting, not yet by measuring."""
_ONE_ROW_TILE = 4096  # weights that a program multiplies in a step
_FEW_ROWS_COLUMNS = 128  # that a program multiplies in a step, at most
_FEWEST_COLUMNS = 32
"""Of an int4 tile the even half alone has to fill the 16 columns that the tensor cores take at least."""
_FEWEST_STEPS = 4
"""Steps along the columns that a part keeps; shorter ones would be over before loads overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What one program computes, and how many share the columns of an output."""

    block_outputs: int
    block_columns: int
    parts: int
    part_columns: int
    """Columns of each part but the last; a multiple of ``block_columns``."""
    workspace_bytes: int
    """Float32 sums of the parts; 0 where the columns are not divided."""


def choose_tiling(
    rows: int, outputs: int, columns: int, *, form: str | None, group: int = 0
) -> Tiling:
    """Return the tiling of ``x[rows, columns] @ W[outputs, columns]^T``; a packed ``form`` has a ``group``."""
    fewest = max(_FEWEST_COLUMNS, group)
    if rows == 1:
        # An int4 byte holds two columns, so that a row has to be twice as wide to fill the same loads.
        widest = 2048 if form == "int4" else 1024
        block_columns = _clamped(columns, fewest, widest)
        block_outputs = _clamped(_ONE_ROW_TILE // block_columns, 4, 32)
        least = 1
    else:
        block_columns = _clamped(columns, fewest, _FEW_ROWS_COLUMNS)
        block_outputs, least = 64, 16
    while block_outputs > least and _blocks(outputs, block_outputs) < TARGET_PROGRAMS:
        block_outputs //= 2
    parts = TARGET_PROGRAMS // _blocks(outputs, block_outputs)
    parts = max(1, min(parts, columns // (_FEWEST_STEPS * block_columns)))
    part_columns = _blocks(_blocks(columns, parts), block_columns) * block_columns
    parts = _blocks(columns, part_columns)
    return Tiling(
        block_outputs=block_outputs,
        block_columns=block_columns,
        parts=parts,
        part_columns=part_columns,
        workspace_bytes=4 * parts * rows * outputs if parts > 1 else 0,
    )


def _clamped(size: int, least: int, most: int) -> int:
    """Return the smallest power of two from ``least`` to ``most`` that holds ``size``, or ``most``."""
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
