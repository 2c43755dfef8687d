"""Rows of a weight as ranges of bytes of its file: tiles, and single rows that an op asks for.

A weight lies row by row in its extents, so rows that follow each other are bytes that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from gascompile.core.sources import Extent, WeightSource
from gascompile.core.strides import span_elements
from gascompile.core.tiles import Tile
from gascompile.runtime.protocols import Memory
from gascompile.runtime.transfer.read_plan import Landing, Piece


def weight_view(arena: Memory, offset: int, source: WeightSource) -> torch.Tensor:
    """Return the weight whose bytes lie at ``offset``, with the strides that it has in its model."""
    if not source.stride:
        return arena.view(offset, source.dtype, source.shape)
    count = span_elements(source.shape, source.stride)
    return arena.view(offset, source.dtype, (count,)).as_strided(source.shape, source.stride)


def tile_source(source: WeightSource, tile: Tile) -> WeightSource:
    """Return the source of some rows of ``source``."""
    row_bytes = _row_bytes(source)
    return WeightSource(
        name=tile.name,
        dtype=source.dtype,
        shape=(tile.end - tile.begin, *source.shape[1:]),
        extents=tuple(_range(source.extents, tile.begin * row_bytes, tile.end * row_bytes)),
    )


def check_rows(source: WeightSource, indices: torch.Tensor) -> None:
    """Raise ``IndexError`` unless ``source`` has all the rows that ``indices`` names."""
    if not indices.numel():
        return
    lowest, highest = map(int, indices.aminmax())
    if lowest < 0 or highest >= source.shape[0]:
        wrong = lowest if lowest < 0 else highest
        raise IndexError(
            f"index {wrong} is out of range: '{source.name}' has {source.shape[0]} rows"
        )


def rows_landing(source: WeightSource, rows: Sequence[int]) -> Landing:
    """Return the reads that bring ``rows`` of ``source`` in this order, one after the other.

    They go through the page cache: a row is smaller than what direct reads are good for.
    """
    row_bytes = _row_bytes(source)
    pieces: list[Piece] = []
    position = 0
    for row in rows:
        for extent in _range(source.extents, row * row_bytes, (row + 1) * row_bytes):
            pieces.append(
                Piece(
                    path=extent.path,
                    offset=extent.offset,
                    position=position,
                    size_bytes=extent.size_bytes,
                    needed_bytes=extent.size_bytes,
                    direct=False,
                )
            )
            position += extent.size_bytes
    return Landing(
        name=source.name, shift_bytes=0, size_bytes=row_bytes * len(rows), pieces=tuple(pieces)
    )


def _row_bytes(source: WeightSource) -> int:
    dtype: torch.dtype = getattr(torch, source.dtype)
    return math.prod(source.shape[1:]) * dtype.itemsize


def _range(extents: Sequence[Extent], begin: int, end: int) -> Iterator[Extent]:
    """Yield the parts of ``extents`` that hold bytes ``begin`` to ``end`` of the weight."""
    start = 0
    for extent in extents:
        low, high = max(begin - start, 0), min(end - start, extent.size_bytes)
        if low < high:
            yield Extent(path=extent.path, offset=extent.offset + low, size_bytes=high - low)
        start += extent.size_bytes
