"""Reads from drives into a device's memory with KvikIO; the only file that imports it.

KvikIO falls back from GPUDirect Storage to reads through RAM without a word: its own compatibility mode where
it finds no cuFile or no /run/udev, cuFile's where the kernel module or the file system cannot do it. Which of
them is on is asked for, logged where it is not the direct path, and part of every report.

One pool of KvikIO's threads serves all files, so that several drives read at once. Its reads are not ordered by
any stream: a thread of the engine waits for the event that frees a reservation before it starts to fill it.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gascompile.errors import DeviceError, StorageError
from gascompile.ir import IoSettings
from gascompile.runtime.landing import Landing, Piece
from gascompile.runtime.probe import GpuFacts, look, storage_faults

if TYPE_CHECKING:
    from gascompile.runtime.protocols import Event, Memory

_log = logging.getLogger(__name__)

GPU_DIRECT = "GPUDirect Storage"
CUFILE_COMPAT = "cuFile's compatibility mode"
KVIKIO_COMPAT = "KvikIO's compatibility mode"

_NUM_REQUESTS = 4
"""Tensors under way at once: each waits for its chunks, so that those of the next are queued meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTaken:
    """How KvikIO's reads reach the device."""

    name: str
    reason: str = ""
    """Why it is not the direct one."""

    @property
    def is_direct(self) -> bool:
        """Whether reads go from the drive to the device without a stop in RAM."""
        return self.name == GPU_DIRECT

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def import_kvikio() -> Any:
    """Return the module; raises ``DeviceError`` where it is not installed or does not load."""
    try:
        kvikio = importlib.import_module("kvikio")
        for part in ("defaults", "cufile_driver"):
            importlib.import_module(f"kvikio.{part}")
    except ImportError as error:
        raise DeviceError(
            f"KvikIO cannot be used: {error}. Install it with pip install 'gascompile[gpu]', or measure this machine "
            "again so that its plans read without it: gascompile calibrate",
            cause="no kvikio",
        ) from error
    return kvikio


def path_taken(kvikio: Any, facts: GpuFacts) -> PathTaken:
    """Return the path that ``kvikio`` takes on a machine with ``facts``."""
    missing = "; ".join(fault.detail for fault in storage_faults(facts))
    if _is_compat(kvikio):
        return PathTaken(
            name=KVIKIO_COMPAT, reason=missing or "KVIKIO_COMPAT_MODE, or no libcufile"
        )
    try:
        available = bool(kvikio.cufile_driver.get("is_gds_available"))
    except RuntimeError as error:
        return PathTaken(name=CUFILE_COMPAT, reason=f"cuFile's driver does not answer: {error}")
    if not available or not facts.nvidia_fs:
        return PathTaken(
            name=CUFILE_COMPAT, reason=missing or "cuFile says that GDS is not available"
        )
    return PathTaken(name=GPU_DIRECT)


def _is_compat(kvikio: Any) -> bool:
    """Return whether KvikIO reads by POSIX calls; ``AUTO`` is what it has found out to prefer."""
    mode = getattr(kvikio.defaults.get("compat_mode"), "name", "AUTO")
    return mode == "ON" or (mode != "OFF" and bool(kvikio.defaults.is_compat_mode_preferred()))


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
        with self._lock:
            for handle in self._handles.values():
                # A handle whose driver is gone has nothing left to give back.
                with contextlib.suppress(RuntimeError, OSError):
                    handle.close()
            self._handles.clear()


class _Request:
    """A tensor under way; a ``Ticket`` whose bytes are in place once it is done."""

    event: Event | None = None

    def __init__(
        self,
        landing: Landing,
        target: torch.Tensor,
        link: str,
        after: Event | None,
        on_done: Callable[[], None] | None,
    ) -> None:
        self.landing = landing
        self.target = target
        self.link = link
        self.after = after
        self.on_done = on_done
        self.error: BaseException | None = None
        self.ended = threading.Event()

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def may_start(self) -> bool:
        """Whether nobody uses the reservation any more."""
        return self.after is None or self.after.reached

    def wait(self) -> None:
        self.ended.wait()
        if isinstance(self.error, StorageError):
            # A new object each time: several waiters must not share one traceback.
            raise StorageError(str(self.error)) from self.error.__cause__
        if self.error is not None:
            raise self.error


class KvikioEngine:
    """A ``TransferEngine`` from files into the memory of a device."""

    def __init__(
        self,
        arena: Memory,
        io: IoSettings,
        *,
        kvikio: Any = None,
        facts: GpuFacts | None = None,
    ) -> None:
        """Set up KvikIO's pool and find out which path it takes.

        Args:
            arena: where tensors go.
            io: threads of the pool, and the size of its tasks.
            kvikio: the module; imported by default.
            facts: about this machine; looked at by default.

        Raises:
            DeviceError: KvikIO is not installed.
        """
        module = kvikio if kvikio is not None else import_kvikio()
        self.path = path_taken(module, facts or look())
        if not self.path.is_direct:
            _log.warning("reads to the GPU go through RAM, which is slower: %s", self.path)
        module.defaults.set({"num_threads": max(1, io.num_threads), "task_size": io.chunk_bytes})
        self._arena = arena
        self._files = _Files(module)
        self._task_bytes = io.chunk_bytes
        self._lock = threading.Condition()
        self._heap: list[tuple[int, int, _Request]] = []
        self._order = itertools.count()
        self._in_flight = 0
        self._closed = False
        self._links: set[str] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"gascompile-kvikio-{i}", daemon=True)
            for i in range(_NUM_REQUESTS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def paths(self) -> Mapping[str, str]:
        """The path really taken so far, per link."""
        with self._lock:
            return {link: str(self.path) for link in sorted(self._links)}

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
        """Queue a tensor for the reservation at ``address``; see ``TransferEngine.submit``."""
        stop = address + landing.shift_bytes + landing.size_bytes
        if memory is None:
            target = self._arena.bytes(address, stop)
        else:
            target = torch.frombuffer(memory, dtype=torch.uint8)[address:stop]
        request = _Request(landing, target, link, after, on_done)
        with self._lock:
            if self._closed:
                raise StorageError("the engine is closed; open a new session")
            if not landing.pieces:
                request.ended.set()
                return request
            heapq.heappush(self._heap, (key, next(self._order), request))
            self._lock.notify_all()
        return request

    def drain(self) -> None:
        """Cancel what is queued and block until no read is under way."""
        with self._lock:
            for _, _, request in self._heap:
                request.error = StorageError(
                    f"the transfer of '{request.landing.name}' was cancelled"
                )
                request.ended.set()
            self._heap.clear()
            while self._in_flight:
                self._lock.wait()

    def close(self) -> None:
        """Drain, stop the threads and close the files; idempotent."""
        self.drain()
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _serve(self) -> None:
        while (request := self._take()) is not None:
            try:
                if request.after is not None:
                    request.after.wait()
                self._read(request)
                if request.on_done is not None:
                    request.on_done()
            # Whatever a read raises, an interrupt included, is the waiter's: a dead thread would hang it.
            except BaseException as raised:  # noqa: BLE001
                request.error = raised
            with self._lock:
                self._in_flight -= 1
                self._lock.notify_all()
            request.ended.set()

    def _take(self) -> _Request | None:
        """Return the most urgent request that may start, else the most urgent; ``None`` at the end."""
        with self._lock:
            while not self._heap:
                if self._closed:
                    return None
                self._lock.wait()
            ready = [entry for entry in self._heap if entry[2].may_start]
            entry = min(ready or self._heap)
            self._heap.remove(entry)
            heapq.heapify(self._heap)
            self._in_flight += 1
            self._links.add(entry[2].link)
            return entry[2]

    def _read(self, request: _Request) -> None:
        """Read all pieces of a tensor at once and wait for every one, also when one of them fails."""
        failure: StorageError | None = None
        started = []
        for piece in request.landing.pieces:
            into = request.target[piece.position : piece.position + piece.needed_bytes]
            try:
                started.append((piece, self._files.read(into, piece, self._task_bytes)))
            except (RuntimeError, OSError, ValueError) as error:
                failure = _read_error(piece, request.landing.name, error)
                break
        for piece, future in started:
            try:
                count = future.get()
            except (RuntimeError, OSError) as error:
                failure = failure or _read_error(piece, request.landing.name, error)
                continue
            if count < piece.needed_bytes and failure is None:
                failure = StorageError(
                    f"{piece.path} ends too early: '{request.landing.name}' needs {piece.needed_bytes} bytes at "
                    f"offset {piece.offset}, the file has {count} of them; the file is truncated, fetch it again"
                )
        if failure is not None:
            raise failure


def _read_error(piece: Piece, name: str, error: Exception) -> StorageError:
    failure = StorageError(
        f"reading {piece.needed_bytes} bytes at offset {piece.offset} of {piece.path} for '{name}' with KvikIO "
        f"failed: {error}; check the drive and the file, then run again"
    )
    failure.__cause__ = error
    return failure


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRead:
    """What reading a part of a file to the device cost."""

    time_s: float
    path: str


class DeviceReader:
    """Reads parts of files into one buffer on the device and times them: what a measurement asks for."""

    def __init__(
        self, target: torch.Tensor, facts: GpuFacts | None = None, *, kvikio: Any = None
    ) -> None:
        """Find out which path is taken; raises ``DeviceError`` where KvikIO is not installed."""
        self._target = target
        self._kvikio = kvikio if kvikio is not None else import_kvikio()
        self.path = path_taken(self._kvikio, facts or look())
        self._set: IoSettings | None = None

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> DeviceRead:
        """Read ``size_bytes`` at ``offset``; ``into``, which is in RAM, is left alone."""
        del into
        if io != self._set:
            settings = {"num_threads": io.num_threads, "task_size": io.chunk_bytes}
            self._kvikio.defaults.set(settings)
            self._set = io
        with self._kvikio.CuFile(path, "r") as handle:
            start = time.perf_counter()
            count = handle.pread(
                self._target[:size_bytes], size_bytes, offset, io.chunk_bytes
            ).get()
            time_s = time.perf_counter() - start
        if count != size_bytes:
            raise StorageError(
                f"KvikIO read {count} of {size_bytes} bytes at offset {offset} of {path}; check the drive"
            )
        return DeviceRead(time_s=time_s, path=str(self.path))
