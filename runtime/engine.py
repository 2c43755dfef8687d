"""Positional reads from files into fixed memory, by a pool of threads, most urgent tensor first.

A request is one tensor; its chunks are served together, by as many threads as are free. A request that
fails does not end before its chunks in flight have ended, so that nothing writes behind a waiter's back.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gascompile.errors import StorageError
from gascompile.ir import Extent, IoSettings, WeightSource
from gascompile.runtime.files import SourceFile, SourceFiles
from gascompile.runtime.landing import InPlace, Landing, Piece, plan_landing
from gascompile.runtime.protocols import Delivery, Event, Reader, Receive, read_at
from gascompile.units import PAGE_BYTES, align_up

DIRECT = "O_DIRECT"
PAGE_CACHE = "page cache"


class _Request:
    """A tensor under way; a ``Ticket``. All but ``wait`` and ``done`` belongs to the engine's lock."""

    __slots__ = (
        "delivery",
        "ended",
        "error",
        "event",
        "helper",
        "landing",
        "link",
        "next_piece",
        "on_done",
        "open_pieces",
    )

    def __init__(
        self,
        landing: Landing,
        delivery: Delivery,
        link: str,
        on_done: Callable[[], None] | None,
        helper: Callable[[_Request], None] | None,
    ) -> None:
        self.landing = landing
        self.delivery = delivery
        self.event: Event | None = None
        self.link = link
        self.on_done = on_done
        self.helper = helper
        self.next_piece = 0
        self.open_pieces = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def exhausted(self) -> bool:
        """Whether no chunk is left to be taken."""
        return self.error is not None or self.next_piece == len(self.landing.pieces)

    def wait(self) -> None:
        if self.helper is not None:
            self.helper(self)
        self.ended.wait()
        if isinstance(self.error, StorageError):
            # A new object each time: several waiters must not share one traceback.
            raise StorageError(str(self.error)) from self.error.__cause__
        if self.error is not None:
            raise self.error


class Engine:
    """Reads landings with ``io.num_threads`` threads."""

    def __init__(
        self,
        files: SourceFiles,
        memory: memoryview | Receive,
        io: IoSettings,
        *,
        reader: Reader = read_at,
    ) -> None:
        """Start the threads; ``memory`` is where tensors go, or what receives them."""
        self._files = files
        self._memory = memory
        self._reader = reader
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._heap: list[tuple[int, int, _Request]] = []
        self._order = itertools.count()
        self._in_flight = 0
        self._closed = False
        self._paths: dict[str, set[str]] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"gascompile-read-{i}", daemon=True)
            for i in range(max(1, io.num_threads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path really taken so far, per link: ``O_DIRECT``, ``page cache`` or both."""
        with self._lock:
            return {link: " + ".join(sorted(taken)) for link, taken in self._paths.items() if taken}

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | None = None,
        on_done: Callable[[], None] | None = None,
        after: Event | None = None,
    ) -> _Request:
        """Queue a tensor for the reservation at ``address``, in ``memory`` if it is not for the engine's own.

        Returns at once. The smallest ``key`` is served first, equal ones in the order of submission.
        ``on_done`` is called by a reading thread once all bytes have arrived. Memory of the host is read
        into at once, whatever ``after`` says; who waits for it, and is not called back, reads along: all
        threads may be in the middle of large chunks.
        """
        own = self._memory if memory is None else memory
        delivery: Delivery = (
            InPlace(own, address)
            if isinstance(own, memoryview)
            else own(landing, address, link, after)
        )
        helps = memory is not None and on_done is None
        request = _Request(landing, delivery, link, on_done, self._help if helps else None)
        with self._lock:
            if self._closed:
                raise StorageError("the engine is closed; open a new session")
            if not landing.pieces:
                request.ended.set()
                return request
            heapq.heappush(self._heap, (key, next(self._order), request))
            self._work_ready.notify(len(landing.pieces) - helps)
        return request

    def drain(self) -> None:
        """Cancel what is queued and block until no read is in flight."""
        with self._lock:
            self._cancel_queued()
            while self._in_flight:
                self._idle.wait()

    def close(self) -> None:
        """Drain and join the threads; idempotent."""
        with self._lock:
            self._closed = True
            self._cancel_queued()
            self._work_ready.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _cancel_queued(self) -> None:
        for _, _, request in self._heap:
            # One whose last chunk is in flight will be whole; one that has failed ends by itself.
            if request.exhausted:
                continue
            request.error = StorageError(
                f"the read of '{request.landing.name}' was cancelled: its run or its session has ended"
            )
            if not request.open_pieces:
                request.delivery.give_up()
                request.ended.set()
        self._heap.clear()

    # ------------------------------------------------------------ reading threads

    def _serve(self) -> None:
        while (task := self._take()) is not None:
            self._serve_piece(*task)
            # A request may hold memory of the caller's, which must not live until the next one comes.
            del task
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.notify_all()

    def _help(self, request: _Request) -> None:
        """Read chunks of ``request`` on the thread that waits for it, until none is left to be taken.

        An interrupt may end it anywhere. So these reads are not in flight: nobody has to wait for them.
        """
        try:
            while (piece := self._next_piece(request)) is not None:
                try:
                    taken = self._read_piece(piece, request)
                except BaseException:
                    # What was raised leads to the caller's frames and their tensors: the request must not keep it.
                    name = request.landing.name
                    self._finish(request, (), StorageError(f"the read of '{name}' has failed"))
                    request.ended.wait()
                    raise
                self._finish(request, taken, None)
        finally:
            with self._lock:
                # No thread comes by for it, and it holds memory of the caller's.
                self._heap = [entry for entry in self._heap if entry[2] is not request]
                heapq.heapify(self._heap)

    def _next_piece(self, request: _Request) -> Piece | None:
        with self._lock:
            return None if request.exhausted else self._take_from(request)

    def _take_from(self, request: _Request) -> Piece:
        piece = request.landing.pieces[request.next_piece]
        request.next_piece += 1
        request.open_pieces += 1
        return piece

    def _serve_piece(self, request: _Request, piece: Piece) -> None:
        taken: tuple[str, ...] = ()
        error: BaseException | None = None
        try:
            taken = self._read_piece(piece, request)
        # Whatever a read raises, an interrupt included, is the waiter's: a dead thread would hang it.
        except BaseException as raised:  # noqa: BLE001
            error = raised
        self._finish(request, taken, error)

    def _take(self) -> tuple[_Request, Piece] | None:
        """Return the next chunk of the most urgent request; ``None`` when the engine closes."""
        with self._lock:
            while True:
                while self._heap and self._heap[0][2].exhausted:
                    heapq.heappop(self._heap)
                if self._heap:
                    break
                if self._closed:
                    return None
                self._work_ready.wait()
            request = self._heap[0][2]
            self._in_flight += 1
            return request, self._take_from(request)

    def _finish(
        self, request: _Request, taken: tuple[str, ...], error: BaseException | None
    ) -> None:
        with self._lock:
            request.open_pieces -= 1
            if request.error is None:
                request.error = error
            self._paths.setdefault(request.link, set()).update(taken)
            ended = request.exhausted and not request.open_pieces
        if ended:
            if request.error is None:
                request.event = request.delivery.end()
                request.error = _raised_by(request.on_done)
            else:
                request.delivery.give_up()
            request.ended.set()

    def _read_piece(self, piece: Piece, request: _Request) -> tuple[str, ...]:
        """Read one chunk whole and return the paths it took."""
        with request.delivery.room(piece) as into:
            return self._fill(into, piece, request.landing.name)

    def _fill(self, into: memoryview, piece: Piece, name: str) -> tuple[str, ...]:
        file = self._files[piece.path]
        done = 0
        if piece.direct and file.is_direct:
            done = self._read_direct(file, into, piece, name)
            if done >= piece.needed_bytes:
                return (DIRECT,)
        self._read_buffered(file, into, piece, done, name)
        return (DIRECT, PAGE_CACHE) if done else (PAGE_CACHE,)

    def _read_direct(self, file: SourceFile, into: memoryview, piece: Piece, name: str) -> int:
        """Return the bytes read in whole pages; less than needed when the page cache has to go on."""
        done = 0
        while done < piece.needed_bytes:
            try:
                count = self._reader(file.direct, into[done:], piece.offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._files.refuse_direct(file, error.strerror or "EINVAL")
                    return done
                raise _read_error(piece, name, error) from error
            if done + count < piece.needed_bytes:
                # A direct read ends within a page only where the file ends: the rest is not for O_DIRECT.
                count -= count % PAGE_BYTES
                if not count:
                    return done
            done += count
        return done

    def _read_buffered(
        self, file: SourceFile, into: memoryview, piece: Piece, done: int, name: str
    ) -> None:
        first = done
        while done < piece.needed_bytes:
            window = into[done : piece.needed_bytes]
            try:
                count = self._reader(file.buffered, window, piece.offset + done)
            except OSError as error:
                raise _read_error(piece, name, error) from error
            if not count:
                raise StorageError(
                    f"{piece.path} ends too early: '{name}' needs {piece.needed_bytes} bytes at offset "
                    f"{piece.offset}, the file has {done} of them; the file is truncated, fetch it again"
                )
            done += count
        if hasattr(os, "posix_fadvise"):
            # Weights are read once per visit: kept pages would only push out what others need.
            length = piece.needed_bytes - first
            os.posix_fadvise(file.buffered, piece.offset + first, length, os.POSIX_FADV_DONTNEED)


def _raised_by(callback: Callable[[], None] | None) -> BaseException | None:
    """Call back on a reading thread, which must survive whatever the callback does."""
    try:
        if callback is not None:
            callback()
    except BaseException as raised:  # noqa: BLE001
        return raised
    return None


def _read_error(piece: Piece, name: str, error: OSError) -> StorageError:
    return StorageError(
        f"reading {piece.size_bytes} bytes at offset {piece.offset} of {piece.path} for '{name}' failed: "
        f"{error.strerror or error}; check the drive and the file, then run again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMeasurement:
    """What reading a part of a file cost."""

    time_s: float
    size_bytes: int
    path: str
    """The I/O path really taken: ``O_DIRECT``, ``page cache`` or both."""


def read_blocks(
    path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
) -> ReadMeasurement:
    """Read a part of a file as the runtime would read a weight, and time it.

    ``into`` should be page-aligned memory (an ``Arena``'s) with room for ``size_bytes`` and a page more.

    Raises:
        StorageError: the file cannot be read or is too short.
        ValueError: ``into`` is too small.
    """
    room_bytes = align_up(offset % PAGE_BYTES + size_bytes)
    if len(into) < room_bytes:
        raise ValueError(
            f"reading {size_bytes} bytes needs {room_bytes} bytes of memory, not {len(into)}"
        )
    source = WeightSource(
        name=path,
        dtype="uint8",
        shape=(size_bytes,),
        extents=(Extent(path=path, offset=offset, size_bytes=size_bytes),),
    )
    files = SourceFiles([path])
    engine = Engine(files, into, io)
    try:
        landing = plan_landing(source, chunk_bytes=io.chunk_bytes, is_direct=files.is_direct)
        start_s = time.perf_counter()
        engine.submit(landing, 0, key=0, link="").wait()
        time_s = time.perf_counter() - start_s
        return ReadMeasurement(
            time_s=time_s, size_bytes=size_bytes, path=engine.paths.get("", PAGE_CACHE)
        )
    finally:
        engine.close()
        files.close()
