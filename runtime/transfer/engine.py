"""Positional reads from files into fixed memory, by a pool of threads, most urgent tensor first.

A request is one tensor; its chunks are served together, by as many threads as are free. A request that
fails does not end before its chunks in flight have ended, so that nothing writes behind a waiter's back.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.sources import Extent, WeightSource
from gascompile.core.waiting import Pool
from gascompile.runtime.protocols import Delivery, Event, Reader, Receive, read_at
from gascompile.runtime.transfer.files import SourceFile, SourceFiles
from gascompile.runtime.transfer.read_plan import InPlace, Landing, Piece, plan_landing
from gascompile.runtime.transfer.under_way import UnderWay, cancelled, ends_too_early

DIRECT = "O_DIRECT"
PAGE_CACHE = "page cache"


class _Request(UnderWay):
    """A tensor under way.

    Its chunks are taken from, and counted by, iterators of C: whoever reads one needs no lock for it, so the
    waiting thread may help, and be interrupted anywhere.
    """

    __slots__ = (
        "delivery",
        "finished",
        "helper",
        "landing",
        "link",
        "on_done",
        "untaken",
    )

    def __init__(
        self,
        landing: Landing,
        delivery: Delivery,
        link: str,
        on_done: Callable[[], None] | None,
        helper: Callable[[_Request], None] | None,
    ) -> None:
        super().__init__()
        self.landing = landing
        self.delivery: Delivery | None = delivery
        self.link = link
        self.on_done = on_done
        self.helper = helper
        self.untaken: Iterator[Piece] = iter(landing.pieces)
        self.finished = itertools.count(1)

    def wait(self) -> None:
        if self.helper is not None and not self.gate.is_open:
            self.helper(self)
        super().wait()

    def fail(self, error: BaseException) -> int:
        """Leave the chunks that nobody has taken, and return how many they were."""
        self.error = self.error or error
        return len(list(self.untaken))

    def finish(self, num_pieces: int) -> None:
        """Note that so many chunks are over; the last one ends the request."""
        for _ in range(num_pieces):
            if next(self.finished) == len(self.landing.pieces):
                self._end()

    def _end(self) -> None:
        delivery, self.delivery = self.delivery, None
        assert delivery is not None, "a request ends once"
        if self.error is None:
            self.event = delivery.end()
            self.error = _raised_by(self.on_done)
        else:
            delivery.give_up()
        self.gate.open()


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
        self._memory = memory
        self._reads = _Reads(files, reader)
        self.pool = Pool[_Request](self._reads, max(1, io.num_threads), "gascompile-read")
        # An engine that is dropped, half made or whole, stops its threads.
        weakref.finalize(self, self.pool.stop).atexit = False
        self.pool.start()

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path really taken so far, per link: ``O_DIRECT``, ``page cache`` or both."""
        paths = dict(self._reads.paths)
        return {link: " + ".join(sorted(taken)) for link, taken in paths.items() if taken}

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | Receive | None = None,
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
        helper = self._reads.help if helps else None
        request = _Request(landing, delivery, link, on_done, helper)
        if self.pool.is_closed:
            raise StorageError("the engine is closed; open a new session")
        if not landing.pieces:
            request.gate.open()
            return request
        if len(landing.pieces) > helps:
            self.pool.put(key, request, len(landing.pieces) - helps)
        return request

    def drain(self) -> None:
        """Cancel what is queued and block until no read of the engine's threads is in flight."""
        self.pool.drain()

    def close(self) -> None:
        """Drain and wait for the threads to end; idempotent, and to be repeated if interrupted."""
        self.pool.close()


class _Reads:
    """Reads chunks of requests; a ``Server`` of the engine's threads."""

    def __init__(self, files: SourceFiles, reader: Reader) -> None:
        self._files = files
        self._reader = reader
        self.paths: dict[str, set[str]] = {}

    def take(self, heap: list[tuple[int, int, _Request]]) -> Callable[[], None] | None:
        """Return the next chunk of the most urgent request that has any."""
        while heap:
            request = heap[0][2]
            piece = next(request.untaken, None)
            if piece is not None:
                return partial(self._serve, request, piece)
            heapq.heappop(heap)
        return None

    def cancel(self, request: _Request) -> None:
        """Leave the chunks that nobody has taken; a request whose last one is in flight will be whole."""
        rest = len(list(request.untaken))
        if rest:
            request.fail(cancelled(request.landing.name))
            request.finish(rest)

    def help(self, request: _Request) -> None:
        """Read chunks of ``request`` on the thread that waits for it, until none is left to be taken.

        An interrupt may end it anywhere. So these reads are not in flight: nobody has to wait for them, and what
        they are read to lives as long as the request is known to a thread.
        """
        for piece in request.untaken:
            try:
                taken = self._read_piece(piece, request)
            except BaseException:
                # What was raised leads to the caller's frames and their tensors: the request must not keep it.
                name = request.landing.name
                rest = request.fail(StorageError(f"the read of '{name}' has failed"))
                request.finish(1 + rest)
                request.gate.wait()
                raise
            self._note(request.link, taken)
            request.finish(1)

    def _serve(self, request: _Request, piece: Piece) -> None:
        rest = 0
        try:
            self._note(request.link, self._read_piece(piece, request))
        # Whatever a read raises is the waiter's: a dead thread would hang it.
        except BaseException as raised:  # noqa: BLE001
            rest = request.fail(raised)
        request.finish(1 + rest)

    def _note(self, link: str, taken: tuple[str, ...]) -> None:
        # Each by one call of C, as several threads do it.
        self.paths.setdefault(link, set()).update(taken)

    def _read_piece(self, piece: Piece, request: _Request) -> tuple[str, ...]:
        """Read one chunk whole and return the paths it took."""
        delivery = request.delivery
        assert delivery is not None, "a chunk of it is not over"
        with delivery.room(piece) as into:
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
                raise ends_too_early(piece, name, done)
            done += count
        if hasattr(os, "posix_fadvise"):
            # Weights are read once per staged copy: kept pages would only push out what others need.
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
