"""Times the slow tier with the reader that will run plans: a temporary file of noise, a few reads.

The file is written past the page cache and deleted in every case; what a killed process left behind is
removed by the next measurement. Reads go through the ``ProbeReader`` that is passed in, so the settings found
are those of the engine that uses them, into memory like the arena's. A plan in its steady state reads the
same bytes again and again, which a host with a cache of its own may serve faster than bytes that it has
not seen: the first and the later passes over the file are told apart.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gascompile.core.errors import StorageError
from gascompile.core.huge_pages import map_anonymous
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import MIB, PAGE_BYTES, format_size
from gascompile.cost_models.measure.host import free_bytes

FILE_BYTES = 512 * MIB
BUFFER_BYTES = 64 * MIB
UNIT_BYTES = 16 * MIB
_REWRITE_BYTES = MIB
PROBE_PREFIX = ".gascompile-probe-"
"""Of the names of files that measurements write, which a process that is killed leaves behind."""
_STALE_S = 3600.0  # a probe file that old was left by a process that ended
_WRITE_LIMIT_S = 0.9  # after which the file is as large as it gets
_PROBE_S = 0.06  # that a read by one setting should take
_THREADS = (4, 1, 2, 8)
_CHUNKS_BYTES = (8 * MIB, 4 * MIB, 16 * MIB)  # smaller ones cost the ops a wake-up each
_CLOSE_ENOUGH = 0.95
"""Within 5 %, fewer threads win, for they leave the processor to the ops, and then smaller chunks, for
they let a small tensor be read by several threads."""


class ReadResult(Protocol):
    """What one read cost."""

    @property
    def time_s(self) -> float: ...

    @property
    def path(self) -> str:
        """The I/O path really taken: ``O_DIRECT``, ``page cache`` or both."""


class ProbeReader(Protocol):
    """The runtime engine's positional read into page-aligned memory, timed by itself."""

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> ReadResult: ...


@dataclass(slots=True, kw_only=True)
class ProbeFile:
    """The temporary file, the buffer that reads of it arrive in, and how fast it was written."""

    path: Path
    size_bytes: int
    memory: mmap.mmap
    write_bytes_per_s: float
    """While the file grew."""
    direct: bool
    """Written with ``O_DIRECT``; else written through the page cache, synced and dropped from it."""
    read_paths: set[str] = field(default_factory=set)
    """The I/O paths that reads of it took, in the reader's words."""
    _next: int = 0

    def read_rate(self, read: ProbeReader, io: IoSettings, size_bytes: int) -> float:
        """Return bytes/s of one read; successive reads go through the file, not over the same part."""
        if self._next + size_bytes > self.size_bytes:
            self._next = 0
        offset, self._next = self._next, self._next + size_bytes
        result = read(
            str(self.path),
            offset=offset,
            size_bytes=size_bytes,
            into=memoryview(self.memory)[:size_bytes],
            io=io,
        )
        self.read_paths.add(result.path)
        return size_bytes / max(result.time_s, 1e-9)

    def rewrite_rate(self, size_bytes: int) -> float:
        """Return bytes/s of one thread that writes the first ``size_bytes`` of the file again, in pieces of 1 MiB."""
        flag = os.O_DIRECT if self.direct else 0
        descriptor = os.open(self.path, os.O_WRONLY | flag)
        try:
            start = time.perf_counter()
            written = 0
            while written + _REWRITE_BYTES <= size_bytes:
                piece = memoryview(self.memory)[:_REWRITE_BYTES]
                written += os.pwrite(descriptor, piece, written)
            os.fdatasync(descriptor)
            return written / (time.perf_counter() - start)
        finally:
            os.close(descriptor)

    def rewind(self) -> None:
        """Let the next read start at the beginning."""
        self._next = 0

    def reread_rate(self, read: ProbeReader, io: IoSettings, size_bytes: int) -> float:
        """Return bytes/s of reading the beginning of the file."""
        self.rewind()
        return self.read_rate(read, io, size_bytes)

    def latency_s(self, read: ProbeReader, num_reads: int = 16) -> float:
        """Return the median seconds of reading one page."""
        io = IoSettings(num_threads=1, chunk_bytes=PAGE_BYTES)
        step = self.size_bytes // (num_reads * PAGE_BYTES) * PAGE_BYTES
        times_s = []
        for i in range(num_reads):
            self._next = i * step
            times_s.append(PAGE_BYTES / self.read_rate(read, io, PAGE_BYTES))
        self._next = 0
        return statistics.median(times_s)


def best_setting(
    file: ProbeFile, read: ProbeReader, *, limit_s: float, num_reads: int = 1
) -> tuple[IoSettings, int, Mapping[IoSettings, float]]:
    """Return the fastest setting, a read size that takes about a twentieth of a second, and all rates.

    First the chunk size with four threads, then the number of threads with the best chunk: 6 settings
    instead of 12, each with the best of ``num_reads`` of the same bytes. When ``limit_s`` is over, the
    best so far is taken.
    """
    stop = time.perf_counter() + limit_s
    first = IoSettings(num_threads=_THREADS[0], chunk_bytes=_CHUNKS_BYTES[0])
    rate = file.read_rate(read, first, min(UNIT_BYTES, file.size_bytes))
    largest = min(BUFFER_BYTES, file.size_bytes)
    size_bytes = min(max(round(rate * _PROBE_S) // UNIT_BYTES * UNIT_BYTES, UNIT_BYTES), largest)
    rates: dict[IoSettings, float] = {}
    file.reread_rate(read, first, size_bytes)

    def try_all(settings: list[IoSettings]) -> IoSettings:
        for setting in settings:
            if setting not in rates and (not rates or time.perf_counter() < stop):
                tried = [file.reread_rate(read, setting, size_bytes) for _ in range(num_reads)]
                rates[setting] = max(tried)
        fastest = max(rates.values())
        good = [setting for setting, rate in rates.items() if rate >= _CLOSE_ENOUGH * fastest]
        return min(good, key=lambda setting: (setting.num_threads, setting.chunk_bytes))

    chunk_bytes = try_all(
        [IoSettings(num_threads=_THREADS[0], chunk_bytes=c) for c in _CHUNKS_BYTES]
    ).chunk_bytes
    best = try_all([IoSettings(num_threads=n, chunk_bytes=chunk_bytes) for n in _THREADS])
    return best, size_bytes, rates


def read_through(
    file: ProbeFile, read: ProbeReader, io: IoSettings, size_bytes: int, *, limit_s: float
) -> list[float]:
    """Return the bytes/s of each read while going through the file once, or until ``limit_s`` is over."""
    stop = time.perf_counter() + limit_s
    file.rewind()
    rates = [file.read_rate(read, io, size_bytes)]
    while len(rates) < file.size_bytes // size_bytes and time.perf_counter() < stop:
        rates.append(file.read_rate(read, io, size_bytes))
    return rates


@contextmanager
def probe_file(
    folder: str | os.PathLike[str],
    *,
    most_bytes: int = FILE_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[ProbeFile]:
    """Write a file of up to ``most_bytes`` of noise in ``folder``, at most half the free space; delete it after.

    Raises:
        StorageError: the folder cannot be written to or has no space for a file worth measuring.
    """
    size_bytes = _affordable_bytes(folder, most_bytes)
    _remove_stale(Path(folder))
    # No `with`: the reader may still hold views when an error passes; the map goes with the last one.
    noise = map_anonymous(buffer_bytes)
    words = np.frombuffer(noise, dtype=np.uint64)
    words[:] = 0  # Touches every page, so that no read pays for a page fault.
    num_words = UNIT_BYTES // words.itemsize
    words[:num_words] = np.random.default_rng().integers(1 << 63, size=num_words, dtype=np.uint64)
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=PROBE_PREFIX)
    except OSError as error:
        raise _cannot_write(folder, size_bytes, error) from error
    os.close(descriptor)
    path = Path(name)
    try:
        yield _write(path, words, noise, size_bytes)
    finally:
        path.unlink(missing_ok=True)


def _affordable_bytes(folder: str | os.PathLike[str], most_bytes: int) -> int:
    free = free_bytes(folder)
    size_bytes = min(most_bytes, free // 2 // UNIT_BYTES * UNIT_BYTES)
    if size_bytes < 2 * UNIT_BYTES:
        raise StorageError(
            f"measuring the disk takes a temporary file of {format_size(2 * UNIT_BYTES)} to "
            f"{format_size(most_bytes)}, but {os.fspath(folder)} has {format_size(free)} free; "
            f"free some space, choose another cache_dir, or name a machine"
        )
    return size_bytes


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{PROBE_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _STALE_S:
            path.unlink(missing_ok=True)


def _cannot_write(folder: str | os.PathLike[str], size_bytes: int, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write a temporary file of {format_size(size_bytes)} in {os.fspath(folder)}: "
        f"{error.strerror}; free some space, choose another cache_dir, or name a machine"
    )


def _write(path: Path, words: NDArray[np.uint64], memory: mmap.mmap, size_bytes: int) -> ProbeFile:
    try:
        try:
            written, time_s = _fill(path, words, memory, size_bytes, os.O_DIRECT)
            direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            written, time_s = _fill(path, words, memory, size_bytes, 0)
            direct = False
    except OSError as error:
        raise _cannot_write(path.parent, size_bytes, error) from error
    return ProbeFile(
        path=path,
        size_bytes=written,
        memory=memory,
        write_bytes_per_s=written / time_s,
        direct=direct,
    )


def _fill(
    path: Path, words: NDArray[np.uint64], memory: mmap.mmap, size_bytes: int, flag: int
) -> tuple[int, float]:
    """Write until ``size_bytes`` or the time limit is reached; return bytes and seconds."""
    descriptor = os.open(path, os.O_WRONLY | flag)
    try:
        start = time.perf_counter()
        written = 0
        while written < size_bytes:
            # A new number in each page of the piece: no two pages of the file are equal.
            words[: UNIT_BYTES // 8 : PAGE_BYTES // 8] += np.uint64(written + 1)
            piece = memoryview(memory)[: min(UNIT_BYTES, size_bytes - written)]
            written += os.pwrite(descriptor, piece, written)
            if written >= 2 * UNIT_BYTES and time.perf_counter() - start > _WRITE_LIMIT_S:
                break
        written -= written % UNIT_BYTES
        os.ftruncate(descriptor, written)
        os.fsync(descriptor)
        time_s = time.perf_counter() - start
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return written, time_s
