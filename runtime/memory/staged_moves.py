"""Transfers between a device's memory and files: pieces pass through pinned memory, by one thread each way.

A piece is on its way to the file while the next one leaves the device, and the other way round. The place of
a transfer in the time table of its link is taken when it is asked for.
"""

from __future__ import annotations

import os
import queue
import time
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from gascompile.core.errors import StorageError
from gascompile.core.patience import Watch, arrived
from gascompile.core.sizes import PAGE_BYTES, SPILL_BUFFER_BYTES, align_up
from gascompile.core.waiting import OwnThread
from gascompile.runtime.memory.host_slots import NUM_PIECES, STAGING_BYTES
from gascompile.runtime.memory.source_slots import Pieces
from gascompile.runtime.protocols import Booking, CopyStream, Device, Event, Reader, read_at
from gascompile.runtime.transfer.copying import Writer, read_all, write_all
from gascompile.runtime.transfer.under_way import UnderWay, moving_failed

PIECE_BYTES = SPILL_BUFFER_BYTES


@dataclass(slots=True, kw_only=True, eq=False)
class StagedMove(UnderWay):
    """A transfer under way; a ``Ticket``. The event of one that reads is the end of the last copy to the device."""

    name: str
    pieces: Pieces
    bytes: torch.Tensor | None
    """Of the device; kept until somebody has waited, as a copy may still be under way."""
    stream: CopyStream | None = None
    booking: Booking | None = None
    after: Event | None = None
    begun_s: float = 0.0
    """By ``time.perf_counter``, like ``done_s``; zero before."""
    ended_s: float = 0.0

    @property
    def done_s(self) -> float:
        """When it ended, the copies to the device included."""
        return max(self.ended_s, getattr(self.event, "end_s", 0.0))

    @property
    def is_over(self) -> bool:
        """Whether the memory may go: somebody has waited, or the transfer has ended."""
        if not self.gate.is_open:
            return False
        return self.bytes is None or self.event is None or self.event.reached

    def wait(self) -> None:
        if not self.gate.is_open:
            self.gate.wait(Watch("a transfer"))
        if self.error is not None and self.event is not None:
            # A part is still on its way to memory that who learns of the error may let go.
            self.event.wait()
        self.bytes = None
        UnderWay.wait(self)

    def end(self) -> None:
        """Take note that nothing of it is under way any more, but what ``event`` stands for."""
        self.after = self.stream = None
        self.ended_s = time.perf_counter()
        if self.pieces:
            arrived()
        self.gate.open()

    def fail(self, error: Exception) -> None:
        """Take note of why it cannot be done."""
        if self.error is not None:
            return
        self.error = moving_failed(self.name, error)
        if self.booking is not None:
            self.booking.cancel()


_Jobs = queue.SimpleQueue[StagedMove | None]


@dataclass(slots=True)
class _Buffer:
    memory: memoryview
    bytes: torch.Tensor
    event: Event | None = None
    """End of the last copy to or from it."""


class StagedMoves:
    """The two threads and their memory; close it when no transfer is needed any more."""

    def __init__(
        self, device: Device, *, reader: Reader = read_at, writer: Writer | None = None
    ) -> None:
        """Take the memory and start the threads.

        Args:
            device: whose streams copy.
            reader: the low-level read.
            writer: the low-level write.

        Raises:
            DeviceError: so much memory cannot be pinned.
        """
        self._device = device
        self._memory = device.pinned(STAGING_BYTES)
        self._memory.fill(0, STAGING_BYTES, 0)
        buffers = [
            _Buffer(
                self._memory.memory[start : start + PIECE_BYTES],
                self._memory.bytes(start, start + PIECE_BYTES),
            )
            for start in range(0, STAGING_BYTES, PIECE_BYTES)
        ]
        self._closed = False
        self._jobs: tuple[_Jobs, _Jobs] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._outward = _Outward(self._jobs[0], buffers[:NUM_PIECES], writer or os.pwrite)
        self._inward = _Inward(self._jobs[1], buffers[NUM_PIECES:], reader)
        for jobs in self._jobs:
            weakref.finalize(self, jobs.put, None).atexit = False
        self._threads = (
            OwnThread(self._outward.serve, "gascompile-staged-write"),
            OwnThread(self._inward.serve, "gascompile-staged-read"),
        )

    @property
    def buffer(self) -> memoryview:
        """The memory, for somebody else while nothing is under way."""
        return self._memory.memory

    def submit(
        self,
        name: str,
        content: torch.Tensor,
        link: str,
        after: Event | None,
        pieces: Pieces,
        *,
        writes: bool,
    ) -> StagedMove:
        """Start moving bytes of the device to a place in a file, or back.

        Args:
            name: of the tensor, for messages.
            content: bytes of the device, which stay what they are until the ticket is done and its event reached.
            link: what they go over.
            after: they go no earlier.
            pieces: open file, offset and bytes of each range; one in whole pages, where they are written.
            writes: to the file.
        """
        if self._closed:
            raise StorageError("the session is closed; compile or load the model again")
        stream = self._device.stream(link)
        booking = stream.book(content.nbytes, after=after)
        move = StagedMove(
            name=name,
            pieces=pieces,
            bytes=content,
            stream=stream,
            booking=booking,
            after=after,
        )
        self._jobs[0 if writes else 1].put(move)
        return move

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        if self._closed:
            self.close()
            return
        moves = [StagedMove(name="", pieces=(), bytes=None) for _ in self._jobs]
        for jobs, move in zip(self._jobs, moves, strict=True):
            jobs.put(move)
        for move in moves:
            move.gate.wait(Watch("the end of what moves"))

    def close(self) -> None:
        """Finish what is under way, stop the threads and give the memory back; idempotent."""
        self._closed = True
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(Watch("the end of what moves"))
        self._memory.close()


@dataclass(slots=True)
class _Piece:
    """A part of a move on its way to the file; the last one ends its move."""

    move: StagedMove
    buffer: _Buffer | None
    begin: int
    size_bytes: int
    is_last: bool


class _Outward:
    """Writes: as many pieces leave the device as there is memory for; the oldest goes to the file meanwhile."""

    def __init__(self, jobs: _Jobs, buffers: list[_Buffer], writer: Writer) -> None:
        self._jobs, self._free, self.move_bytes = jobs, deque(buffers), writer
        self._flying: deque[_Piece] = deque()
        self._move: StagedMove | None = None
        self._begin = 0
        self._ends = False

    def serve(self) -> None:
        while not self._ends or self._flying:
            if self._free and not self._ends and self._next():
                continue
            if self._flying:
                self._finish(self._flying.popleft())

    def _next(self) -> bool:
        """Give the next piece to its stream; False where nothing is asked for yet."""
        if self._move is None:
            try:
                self._move = self._jobs.get(block=not self._flying)
            except queue.Empty:
                return False
            self._begin = 0
            if self._move is None:
                self._ends = True
                return False
        move, begin = self._move, self._begin
        total = 0 if move.bytes is None or move.failed else move.bytes.nbytes
        size_bytes = max(min(PIECE_BYTES, total - begin), 0)
        piece = _Piece(move, None, begin, size_bytes, begin + size_bytes >= total)
        if size_bytes:
            piece.buffer = self._free.popleft()
            self._copy(piece, piece.buffer)
        self._flying.append(piece)
        self._begin += size_bytes
        if piece.is_last:
            self._move = None
        return True

    def _copy(self, piece: _Piece, buffer: _Buffer) -> None:
        move, begin, end = piece.move, piece.begin, piece.begin + piece.size_bytes
        assert move.bytes is not None
        assert move.stream is not None
        try:
            buffer.event = move.stream.copy(
                buffer.bytes[: piece.size_bytes],
                move.bytes[begin:end],
                name=move.name,
                after=move.after,
                booking=move.booking,
            )
        # A dead thread would hang all that wait for it.
        except Exception as error:  # noqa: BLE001
            buffer.event = None
            move.fail(error)

    def _finish(self, piece: _Piece) -> None:
        move, buffer = piece.move, piece.buffer
        if buffer is not None:
            try:
                if buffer.event is not None:
                    buffer.event.wait()
                    move.begun_s = move.begun_s or getattr(buffer.event, "begun_s", 0.0)
                if not move.failed:
                    pages = buffer.memory[: align_up(piece.size_bytes, PAGE_BYTES)]
                    ((file, offset, _),) = move.pieces
                    write_all(file, pages, offset + piece.begin, self.move_bytes)
            except Exception as error:  # noqa: BLE001
                move.fail(error)
            buffer.event = None
            self._free.append(buffer)
        if piece.is_last:
            move.end()


class _Inward:
    """Reads: each piece is given to the device once it is there, and the next one read meanwhile."""

    def __init__(self, jobs: _Jobs, buffers: list[_Buffer], reader: Reader) -> None:
        self._jobs, self._buffers, self.move_bytes = jobs, buffers, reader
        self._turn = 0

    def serve(self) -> None:
        while (move := self._jobs.get()) is not None:
            try:
                self._read(move)
            except Exception as error:  # noqa: BLE001
                move.fail(error)
            move.end()
            del move

    def _read(self, move: StagedMove) -> None:
        if move.bytes is None:
            self._wait_all()
            return
        done = 0
        for file, begin, size_bytes in move.pieces:
            at, end = begin, begin + size_bytes
            while at < end:
                # Files of others begin anywhere in their pages.
                head = at % PAGE_BYTES
                count = min(end - at, PIECE_BYTES - head)
                self._pass(move, file, at - head, head, done, count)
                at, done = at + count, done + count

    def _pass(
        self, move: StagedMove, file: int, page: int, head: int, begin: int, count: int
    ) -> None:
        """Read pages from ``page`` on; give the device what lies behind their first ``head`` bytes."""
        assert move.bytes is not None
        assert move.stream is not None
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        if buffer.event is not None:
            buffer.event.wait()
        move.begun_s = move.begun_s or time.perf_counter()
        pages = buffer.memory[: align_up(head + count, PAGE_BYTES)]
        read_all(file, pages, head + count, page, self.move_bytes)
        move.event = buffer.event = move.stream.copy(
            move.bytes[begin : begin + count],
            buffer.bytes[head : head + count],
            name=move.name,
            after=move.after,
            booking=move.booking,
        )

    def _wait_all(self) -> None:
        for buffer in self._buffers:
            if buffer.event is not None:
                buffer.event.wait()
                buffer.event = None
