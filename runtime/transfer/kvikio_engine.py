"""Reads from drives by KvikIO: straight into a device's memory, or into pinned memory where that cannot be.

Its reads are not ordered by any stream: a thread of the engine waits for the event that frees a reservation
before it starts to fill it. As many chunks are under way at once as the engine has a share of KvikIO's pool, so
that the engines of several drives do not queue behind each other there.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.waiting import Pool
from gascompile.runtime.debug.races import Races, host_thread
from gascompile.runtime.debug.watched import WatchedEvent
from gascompile.runtime.devices.probe import GpuFacts, look
from gascompile.runtime.transfer.kvikio_path import (
    POSIX,
    PathTaken,
    buffer_of,
    import_kvikio,
    path_taken,
)
from gascompile.runtime.transfer.read_plan import InPlace, Landing, Piece
from gascompile.runtime.transfer.under_way import UnderWay, cancelled, ends_too_early

if TYPE_CHECKING:
    from gascompile.runtime.protocols import Event, Memory, Receive


_NUM_REQUESTS = 4
"""Tensors under way at once: each waits for its chunks, so that those of the next are queued meanwhile."""


class _Delivery(Protocol):
    """A ``Delivery`` whose room may be a device's."""

    def room(self, piece: Piece) -> AbstractContextManager[memoryview | torch.Tensor]: ...

    def end(self) -> Event | None: ...


class _Straight:
    """A delivery into a reservation itself: there is nothing left to do once a chunk is read."""

    def __init__(self, target: torch.Tensor, landing: Landing, races: Races | None) -> None:
        self._target = target
        self._name = landing.name
        self._races = races

    @contextmanager
    def room(self, piece: Piece) -> Iterator[torch.Tensor]:
        part = self._target[piece.position : piece.position + piece.needed_bytes]
        if self._races is not None:
            what = "a read to the device"
            self._races.access(host_thread(), part, writes=True, name=self._name, what=what)
        yield part

    def end(self) -> Event | None:
        """Return nothing to wait for; on a watched device, what the reading thread knows."""
        if self._races is None:
            return None
        return WatchedEvent(None, self._races.mark(host_thread()), self._races)


class _Files:
    """``CuFile`` handles, opened once each."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def read(self, into: Any, piece: Piece, task_bytes: int) -> Any:
        """Start to read a piece into an array of its size; returns the future of the bytes read."""
        with self._lock:
            if piece.path not in self._handles:
                self._handles[piece.path] = self._kvikio.CuFile(piece.path, "r")
            handle = self._handles[piece.path]
        return handle.pread(into, piece.needed_bytes, piece.offset, task_bytes)

    def close(self) -> None:
        """Close the files; nobody reads any more."""
        while self._handles:
            _, handle = self._handles.popitem()
            # A handle whose driver is gone has nothing left to give back.
            with contextlib.suppress(RuntimeError, OSError):
                handle.close()


class _Request(UnderWay):
    """A tensor under way."""

    def __init__(
        self,
        landing: Landing,
        delivery: _Delivery,
        link: str,
        *,
        after: Event | None,
        on_done: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.landing = landing
        self.delivery = delivery
        self.link = link
        self.after = after
        self.on_done = on_done

    @property
    def may_start(self) -> bool:
        """Whether nobody uses the reservation any more."""
        return self.after is None or self.after.reached


class _Flight:
    """A chunk under way, with its room in memory and its part of the window."""

    def __init__(
        self, request: _Request, piece: Piece, files: _Files, task_bytes: int, window: Any
    ) -> None:
        """Start to read; the caller has acquired ``window``, which is released when this is over."""
        self._piece = piece
        self._name = request.landing.name
        with ExitStack() as stack:
            stack.callback(window.release)
            into = stack.enter_context(request.delivery.room(piece))
            try:
                buffer = buffer_of(into[: piece.needed_bytes])
                self._future = files.read(buffer, piece, task_bytes)
            except (RuntimeError, OSError, ValueError) as error:
                raise _read_error(piece, self._name, error) from error
            self._stack = stack.pop_all()

    def land(self) -> None:
        """Wait for the chunk and deliver it; raises ``StorageError``, and then delivers nothing."""
        piece = self._piece
        with self._stack:
            try:
                count = self._future.get()
            except (RuntimeError, OSError) as error:
                raise _read_error(piece, self._name, error) from error
            if count < piece.needed_bytes:
                raise ends_too_early(piece, self._name, count)

    def abandon(self) -> None:
        """Wait until nothing writes any more, whatever became of the chunk."""
        with contextlib.suppress(StorageError):
            self.land()


class KvikioEngine:
    """A ``TransferEngine`` from files into the memory of a device."""

    def __init__(
        self,
        arena: Memory,
        io: IoSettings,
        *,
        kvikio: Any = None,
        facts: GpuFacts | None = None,
        receive: Receive | None = None,
        races: Races | None = None,
        num_engines: int = 1,
    ) -> None:
        """Set up KvikIO's pool and find out which path it takes.

        Args:
            arena: where tensors go.
            io: threads of the pool that are this engine's, and the size of its tasks.
            kvikio: the module; imported by default.
            facts: about this machine; looked at by default.
            receive: takes chunks in memory of the host, where they cannot go to the arena straight.
            races: who watches the accesses to the arena.
            num_engines: how many engines like this one share the pool.

        Raises:
            DeviceError: KvikIO is not installed.
        """
        module = kvikio if kvikio is not None else import_kvikio()
        self.path: PathTaken = path_taken(module, facts or look())
        num_threads = max(1, io.num_threads)
        settings = {"num_threads": num_threads * num_engines, "task_size": io.chunk_bytes}
        module.defaults.set(settings)
        # KvikIO reads smaller parts by POSIX calls whatever its mode, and says so nowhere.
        self._threshold_bytes = int(module.defaults.get("gds_threshold"))
        self._arena = arena
        self._receive = receive
        self._races = races
        self._files = _Files(module)
        self._paths: dict[str, set[str]] = {}
        serves = _Serves(self._files, io.chunk_bytes, num_threads)
        self.pool = Pool[_Request](serves, _NUM_REQUESTS, "gascompile-kvikio")
        weakref.finalize(self, self.pool.stop).atexit = False
        self.pool.start()

    @property
    def paths(self) -> Mapping[str, str]:
        """The path really taken so far, per link."""
        return {link: " + ".join(sorted(taken)) for link, taken in self._paths.items()}

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
        """Queue a tensor for the reservation at ``address``; see ``TransferEngine.submit``."""
        straight = memory is None and self._receive is None
        # Copies out of memory of the host wait for the reservation; the reads into it need not.
        wait_for = after if straight else None
        delivery = self._delivery(landing, address, link, memory, after)
        request = _Request(landing, delivery, link, after=wait_for, on_done=on_done)
        if self.pool.is_closed:
            raise StorageError("the engine is closed; open a new session")
        if not landing.pieces:
            request.gate.open()
            return request
        self._paths.setdefault(link, set()).update(self._names(landing, memory))
        self.pool.put(key, request, 1)
        return request

    def _names(self, landing: Landing, memory: memoryview | Receive | None) -> set[str]:
        """Return the paths that the parts of a tensor take."""
        if memory is not None:
            return {POSIX}
        if not self.path.is_direct:
            return {str(self.path)}
        sizes = (piece.needed_bytes for piece in landing.pieces)
        return {POSIX if size < self._threshold_bytes else str(self.path) for size in sizes}

    def _delivery(
        self,
        landing: Landing,
        address: int,
        link: str,
        memory: memoryview | Receive | None,
        after: Event | None,
    ) -> _Delivery:
        if isinstance(memory, memoryview):
            return InPlace(memory, address)
        if memory is not None:
            return memory(landing, address, link, after)
        if self._receive is not None:
            return self._receive(landing, address, link, after)
        stop = address + landing.shift_bytes + landing.size_bytes
        return _Straight(self._arena.bytes(address, stop), landing, self._races)

    def drain(self) -> None:
        """Cancel what is queued and block until no read is under way."""
        self.pool.drain()

    def close(self) -> None:
        """Drain, wait for the threads to end and close the files; idempotent, to be repeated if interrupted."""
        self.pool.close()
        self._files.close()


class _Serves:
    """Reads requests; a ``Server`` of the engine's threads."""

    def __init__(self, files: _Files, task_bytes: int, num_chunks: int) -> None:
        self._files = files
        self._task_bytes = task_bytes
        self._window = threading.Semaphore(num_chunks)
        """Among these threads alone: none of them is ever interrupted."""

    def take(self, heap: list[tuple[int, int, _Request]]) -> Callable[[], None] | None:
        """Return the most urgent request that may start, else the most urgent."""
        if not heap:
            return None
        ready = [entry for entry in heap if entry[2].may_start]
        entry = min(ready or heap)
        heap.remove(entry)
        heapq.heapify(heap)
        return partial(self._serve, entry[2])

    def cancel(self, request: _Request) -> None:
        """End a request that has not begun."""
        request.error = cancelled(request.landing.name)
        request.gate.open()

    def _serve(self, request: _Request) -> None:
        try:
            self._read(request)
            request.event = request.delivery.end()
            if request.on_done is not None:
                request.on_done()
        # Whatever a read raises is the waiter's: a dead thread would hang it.
        except BaseException as raised:  # noqa: BLE001
            request.error = raised
        request.gate.open()

    def _read(self, request: _Request) -> None:
        """Read all pieces of a tensor and wait for every one, also when one of them fails."""
        if request.after is not None:
            request.after.wait()
        flights: deque[_Flight] = deque()
        try:
            for piece in request.landing.pieces:
                # Whoever has chunks under way never blocks for more: it would keep others from theirs.
                while not self._window.acquire(blocking=not flights):
                    flights.popleft().land()
                flights.append(self._start(request, piece))
            while flights:
                flights.popleft().land()
        finally:
            for flight in flights:
                flight.abandon()

    def _start(self, request: _Request, piece: Piece) -> _Flight:
        return _Flight(request, piece, self._files, self._task_bytes, self._window)


def _read_error(piece: Piece, name: str, error: Exception) -> StorageError:
    return StorageError(
        f"reading {piece.needed_bytes} bytes at offset {piece.offset} of {piece.path} for '{name}' with KvikIO "
        f"failed: {error}; check the drive and the file, then run again"
    )
