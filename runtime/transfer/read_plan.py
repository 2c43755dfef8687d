"""Where the bytes of a weight land in its reservation, and by which reads.

Direct I/O needs file offset, length and memory address to be multiples of a page. A tensor that starts
``s`` bytes into a page of its file therefore starts ``s`` bytes into its reservation, and whole pages
are read; the bytes around it fall into the room that ``units.reserve_bytes`` leaves. What cannot be
lined up so is read through the page cache: a tensor whose ``s`` would misalign its elements, an extent
that continues another one at a different offset, the odd bytes where two extents meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.sources import Extent, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One read: at most a chunk, from one file."""

    path: str
    offset: int
    """First byte in the file."""
    position: int
    """First byte in memory, from the start of the reservation."""
    size_bytes: int
    """Bytes to ask for."""
    needed_bytes: int
    """Bytes that must arrive: a page-aligned read may pass the end of the tensor and of the file."""
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The reads that bring one tensor, and where in the reservation it starts."""

    name: str
    shift_bytes: int
    size_bytes: int
    pieces: tuple[Piece, ...]


class InPlace:
    """A ``Delivery`` straight into memory: there is nothing left to do once a chunk is read."""

    __slots__ = ("_address", "_memory")

    def __init__(self, memory: memoryview, address: int) -> None:
        self._memory = memory
        self._address = address

    @contextmanager
    def room(self, piece: Piece) -> Iterator[memoryview]:
        start = self._address + piece.position
        yield self._memory[start : start + piece.size_bytes]

    def end(self) -> None:
        return None

    def give_up(self) -> None:
        return None


def plan_landing(
    source: WeightSource, *, chunk_bytes: int, is_direct: Callable[[str], bool]
) -> Landing:
    """Return the reads of ``source``; ``is_direct`` says which files take O_DIRECT."""
    extents = list(_merged(source.extents))
    if not extents:
        return Landing(name=source.name, shift_bytes=0, size_bytes=0, pieces=())
    first = extents[0]
    itemsize: int = getattr(torch, source.dtype).itemsize
    lines_up = is_direct(first.path) and first.offset % itemsize == 0
    shift = first.offset % PAGE_BYTES if lines_up else 0
    pieces: list[Piece] = []
    position = shift
    for i, extent in enumerate(extents):
        direct = is_direct(extent.path) and (position - extent.offset) % PAGE_BYTES == 0
        last = i == len(extents) - 1
        runs = _aligned_runs(extent, i == 0, last) if direct else [_whole(extent)]
        for run in runs:
            pieces += _chunks(extent, position, run, chunk_bytes)
        position += extent.size_bytes
    return Landing(
        name=source.name, shift_bytes=shift, size_bytes=source.size_bytes, pieces=tuple(pieces)
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes ``start`` to ``stop`` of a file."""

    start: int
    stop: int
    direct: bool


def _merged(extents: tuple[Extent, ...]) -> Iterator[Extent]:
    """Yield the extents with empty ones left out and adjacent ones joined."""
    held: Extent | None = None
    for extent in extents:
        if not extent.size_bytes:
            continue
        if held and held.path == extent.path and held.offset + held.size_bytes == extent.offset:
            held = Extent(
                path=held.path,
                offset=held.offset,
                size_bytes=held.size_bytes + extent.size_bytes,
            )
            continue
        if held:
            yield held
        held = extent
    if held:
        yield held


def _whole(extent: Extent) -> _Run:
    return _Run(extent.offset, extent.offset + extent.size_bytes, False)


def _aligned_runs(extent: Extent, opens: bool, closes: bool) -> list[_Run]:
    """Split an extent into direct pages and odd ends; the tensor's own ends widen to whole pages."""
    start, stop = extent.offset, extent.offset + extent.size_bytes
    low = start // PAGE_BYTES * PAGE_BYTES if opens else align_up(start)
    high = align_up(stop) if closes else stop // PAGE_BYTES * PAGE_BYTES
    if high <= low:
        return [_whole(extent)]
    runs = [_Run(low, high, True)]
    if low > start:
        runs.insert(0, _Run(start, low, False))
    if high < stop:
        runs.append(_Run(high, stop, False))
    return runs


def _chunks(extent: Extent, position: int, run: _Run, chunk_bytes: int) -> Iterator[Piece]:
    stop = extent.offset + extent.size_bytes
    step = align_up(max(chunk_bytes, 1))
    for offset in range(run.start, run.stop, step):
        size_bytes = min(step, run.stop - offset)
        yield Piece(
            path=extent.path,
            offset=offset,
            position=position + offset - extent.offset,
            size_bytes=size_bytes,
            needed_bytes=min(size_bytes, stop - offset),
            direct=run.direct,
        )
