"""Where activations go that leave memory for a while: an unnamed file with a slot per tensor.

A slot may also lie in files of others, anywhere in them, from which it is read alone.

One thread writes and one reads. Memory that consists of whole pages goes straight to the drive and comes
straight from it, by threads of the native library where there is one; what an allocator has put elsewhere is
not aligned for that and goes through a buffer. The file has no name: whatever ends the process gives its
space back.
"""

from __future__ import annotations

import ctypes
import os
import queue
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gascompile.core.errors import StorageError
from gascompile.core.parts import Span
from gascompile.core.patience import Watch, arrived
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.waiting import OwnThread, life, require_life
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.source_slots import Pieces, SourceSlots
from gascompile.runtime.memory.unnamed_file import open_unnamed, take_space
from gascompile.runtime.protocols import Event, Reader, Ticket, read_at
from gascompile.runtime.transfer.copying import Writer, copy_range, read_all, write_all
from gascompile.runtime.transfer.page_ring import LaneMoves, RingLane
from gascompile.runtime.transfer.under_way import UnderWay, moving_failed

_NOTHING: Pieces = ((-1, 0, 0),)


@dataclass(slots=True, eq=False)
class _Move(UnderWay):
    pieces: Pieces
    storage: torch.UntypedStorage | None
    """Let go of before the move ends, so that the last reader of the tensor frees its memory."""
    name: str
    begun_s: float = 0.0
    """By ``time.perf_counter``, like ``done_s``; zero before."""
    done_s: float = 0.0


class Spill:
    """Slots in a file; close it when no transfer is needed any more."""

    def __init__(
        self,
        folder: Path,
        slots: Mapping[str, tuple[int, int]],
        buffers: memoryview,
        *,
        pages: Pages | None = None,
        sources: SourceSlots | None = None,
        moves: DeviceMoves | None = None,
        reader: Reader = read_at,
        writer: Writer | None = None,
    ) -> None:
        """Take the file's space and start the threads.

        Args:
            folder: where the file lies; made if missing.
            slots: offset and largest size of each tensor that will move; they may overlap where the
                tensors are never out at the same time.
            buffers: page-aligned memory, half of it for each direction.
            pages: know which storages may be used to the end of their last page.
            sources: where tensors lie that have no slot in the file until ``take_slot``.
            moves: carry out what is asked for with a link: storages are a device's then, and slots may be the host's.
            reader: the low-level read of what goes through a buffer.
            writer: the low-level write of it.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self._slots = dict(slots)
        ends = (offset + align_up(size_bytes, PAGE_BYTES) for offset, size_bytes in slots.values())
        self._end = max(ends, default=0)
        self._pages, self._sources, self._moves = pages, sources, moves
        self._folder = folder
        self._file, self.path = open_unnamed(folder, self._end)
        self._buffered = _Buffered(self._file, reader, writer or os.pwrite)
        self._plain = -1
        self._buffers = buffers
        self._life = life()
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Move | None]] = []
        self._threads: list[OwnThread] = []
        self._lanes: list[RingLane] = []
        try:
            self._start(buffers)
        except BaseException:
            self.close()
            raise

    def _start(self, buffers: memoryview) -> None:
        half = len(buffers) // 2
        for name, serve, buffer in (
            ("write", self._buffered.write, buffers[:half]),
            ("read", self._buffered.read, buffers[half:]),
        ):
            if self._pages is not None:
                self._lanes.append(self._pages.lane())
            jobs: queue.SimpleQueue[_Move | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            weakref.finalize(self, jobs.put, None).atexit = False
            work = partial(_serve, jobs, serve, buffer)
            self._threads.append(OwnThread(work, f"gascompile-spill-{name}"))

    def write(
        self,
        name: str,
        storage: torch.UntypedStorage,
        *,
        link: str | None = None,
        after: Event | None = None,
        parts: Sequence[Span] | None = None,
    ) -> Ticket:
        """Start copying a storage to its slot; it must not change or go before the ticket is done.

        Args:
            name: of the tensor.
            storage: of the host; of the device, where there is a link.
            link: what it goes over, and thereby which slot is meant.
            after: the copy starts no earlier.
            parts: pages of it that suffice, as the slot has the rest.
        """
        return self._submit(0, name, storage, link, after, parts)

    def read(
        self,
        name: str,
        storage: torch.UntypedStorage,
        *,
        link: str | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Start filling a storage from its slot; it must have the size that was written. See ``write``."""
        return self._submit(1, name, storage, link, after)

    def _pieces(self, name: str, storage: torch.UntypedStorage, *, writes: bool) -> Pieces:
        if not writes and self._sources is not None and name in self._sources:
            return self._sources.pieces(name)
        slot, size_bytes = self._slots[name]
        if storage.nbytes() > size_bytes:
            raise StorageError(
                f"'{name}' has {storage.nbytes()} bytes, its slot {size_bytes}; plan for the larger input"
            )
        return ((self._file, slot, storage.nbytes()),)

    def take_slot(self, name: str, size_bytes: int) -> None:
        """Let a tensor have a slot in the file, unless it has one: it is still read from where it lies.

        Raises:
            StorageError: the drive has too little space.
        """
        if name in self._slots:
            return
        offset = self._end
        take_space(self._file, self._folder, offset, align_up(size_bytes, PAGE_BYTES))
        self._end += align_up(size_bytes, PAGE_BYTES)
        self._slots[name] = (offset, size_bytes)

    def put(self, name: str, fill: Callable[[memoryview, int], None], size_bytes: int) -> None:
        """Fill a slot from elsewhere, a buffer at a time; blocks, and nothing else may be under way.

        Args:
            fill: writes a part of the tensor's bytes, from an offset on, into the memory that it is given.

        Raises:
            StorageError: the file cannot be written.
        """
        require_life(self._life, "the spill file")
        slot, _ = self._slots[name]
        for begin in range(0, size_bytes, len(self._buffers)):
            part = self._buffers[: min(len(self._buffers), size_bytes - begin)]
            fill(part, begin)
            try:
                self._buffered.write_all(
                    self._buffers[: align_up(len(part), PAGE_BYTES)], slot + begin
                )
            except OSError as error:
                raise StorageError(
                    f"keeping '{name}' failed: {error.strerror}; check the disk of the cache folder"
                ) from error

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        if self._life is not life():
            return
        if self._closed:
            # Its threads may have ended: then nobody opens the gate of a move.
            self.close()
            return
        if self._moves is not None:
            self._moves.drain()
        empty = torch.UntypedStorage(0)
        ends = [_Move(_NOTHING, empty, "") for _ in self._queues]
        for jobs, move in zip(self._queues, ends, strict=True):
            jobs.put(move)
        for move in ends:
            move.gate.wait(Watch("the end of what moves"))
        for lane in self._lanes:
            lane.drain()

    def place(self, name: str) -> tuple[int, int]:
        """Return the file and the offset of a slot."""
        return self._file, self._slots[name][0]

    def copy_to(self, name: str, target: int, offset: int, size_bytes: int) -> None:
        """Copy the first bytes of a slot to the open file ``target``, by the file system where it can.

        Raises:
            OSError: a file cannot be read or written.
        """
        if self._plain < 0:
            # Direct I/O asks for alignment that the target does not have.
            self._plain = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        copy_range(self._plain, self._slots[name][0], target, offset, size_bytes)

    def close(self) -> None:
        """Finish what is under way, stop the threads and give the file's space back.

        Idempotent; an interrupted call is to be repeated.
        """
        self._closed = True
        if self._moves is not None and self._life is life() and self._file >= 0:
            # Other spills go on with them; none of this one's transfers may find its file closed.
            self._moves.drain()
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join(Watch("the end of what moves"))
        for lane in self._lanes:
            lane.close()
        files, self._file, self._plain = (self._file, self._plain), -1, -1
        for file in files:
            if file >= 0:
                os.close(file)

    def _submit(
        self,
        direction: int,
        name: str,
        storage: torch.UntypedStorage,
        link: str | None,
        after: Event | None,
        parts: Sequence[Span] | None = None,
    ) -> Ticket:
        require_life(self._life, "the spill file")
        if self._closed:
            raise StorageError("the session is closed; compile or load the model again")
        moves, writes = self._moves if link is not None else None, direction == 0
        if moves is not None and link is not None and moves.place(link, writes=writes) == HOST:
            return moves.submit(name, storage, link, after, (), writes=writes, parts=parts)
        pieces = self._pieces(name, storage, writes=writes)
        if moves is not None and link is not None:
            return moves.submit(name, storage, link, after, pieces, writes=writes, parts=parts)
        pages_bytes = align_up(storage.nbytes(), PAGE_BYTES)
        if self._pages is None or self._pages.capacity(storage.data_ptr()) < pages_bytes:
            move = _Move(pieces, storage, name)
            self._queues[direction].put(move)
            return move
        lane = self._lanes[direction]
        ((file, offset, _), *more) = pieces
        if file == self._file:
            moves_of = [
                lane.submit(
                    name,
                    storage,
                    file,
                    offset + begin,
                    writes=writes,
                    size_bytes=min(end, pages_bytes) - begin,
                    begin=begin,
                )
                for begin, end in (parts if writes and parts else ((0, pages_bytes),))
            ]
            return LaneMoves(moves_of) if len(moves_of) > 1 else moves_of[0]
        read, begin = [], 0
        for file, offset, size_bytes in pieces:
            read.append(
                lane.submit(
                    name, storage, file, offset, writes=False, size_bytes=size_bytes, begin=begin
                )
            )
            begin += size_bytes
        return LaneMoves(read) if more else read[0]


class _Buffered:
    """Moves what is not aligned for the drive through buffers; by the own threads of a spill."""

    def __init__(self, file: int, reader: Reader, writer: Writer) -> None:
        self._file, self._reader, self._writer = file, reader, writer

    def write(self, move: _Move, buffer: memoryview) -> None:
        """Copy a storage to its slot."""
        ((_, slot, _),) = move.pieces
        source = memoryview_of(move.storage)
        for begin in range(0, len(source), len(buffer)):
            part = source[begin : begin + len(buffer)]
            buffer[: len(part)] = part
            self.write_all(buffer[: align_up(len(part), PAGE_BYTES)], slot + begin)

    def read(self, move: _Move, buffer: memoryview) -> None:
        """Fill a storage from its slot."""
        target = memoryview_of(move.storage)
        for file, begin, size_bytes in move.pieces:
            at, end = begin, begin + size_bytes
            while at < end:
                head = at % PAGE_BYTES
                count = min(end - at, len(buffer) - head)
                whole = buffer[: align_up(head + count, PAGE_BYTES)]
                read_all(file, whole, head + count, at - head, self._reader)
                target[:count] = buffer[head : head + count]
                target, at = target[count:], at + count

    def write_all(self, pages: memoryview, offset: int) -> None:
        """Write whole pages to the file."""
        write_all(self._file, pages, offset, self._writer)


def _serve(
    jobs: queue.SimpleQueue[_Move | None],
    work: Callable[[_Move, memoryview], None],
    buffer: memoryview,
) -> None:
    while (move := jobs.get()) is not None:
        move.begun_s = time.perf_counter()
        try:
            work(move, buffer)
        # A dead thread would hang all that wait for it.
        except Exception as error:  # noqa: BLE001
            move.error = moving_failed(move.name, error)
        move.storage = None
        move.done_s = time.perf_counter()
        if move.pieces is not _NOTHING:
            arrived()
        move.gate.open()


def memoryview_of(storage: torch.UntypedStorage | None) -> memoryview:
    """Return a storage's memory, which it does not keep alive."""
    assert storage is not None, "a move is served once"
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(memory).cast("B")
