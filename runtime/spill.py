"""Where activations go that leave memory for a while: an unnamed file with a fixed slot per tensor.

One thread writes and one reads, each through a page-aligned bounce buffer of its own, as an allocator's
memory is not aligned for direct I/O. The file has no name: whatever ends the process gives its space back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gascompile.errors import StorageError
from gascompile.runtime.protocols import Reader, Ticket, read_at
from gascompile.units import PAGE_BYTES, align_up, format_size

BOUNCE_BYTES = 1 << 20
"""Size of one of the two bounce buffers; a plan that moves activations reserves both."""

Writer = Callable[[int, memoryview, int], int]
"""A positional write; raises ``OSError`` and may take fewer bytes than it is given."""


@dataclass(slots=True)
class _Move:
    """A transfer under way; a ``Ticket``."""

    slot: int
    storage: torch.UntypedStorage
    name: str
    error: StorageError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise StorageError(str(self.error)) from self.error.__cause__


class Spill:
    """Slots in a file; close it when no transfer is needed any more."""

    def __init__(
        self,
        folder: Path,
        sizes_bytes: Mapping[str, int],
        *,
        reader: Reader = read_at,
        writer: Writer = os.pwrite,
    ) -> None:
        """Take the file's space and start the threads.

        Args:
            folder: where the file lies; made if missing.
            sizes_bytes: the tensors that will move, with their largest sizes.
            reader: the low-level read.
            writer: the low-level write.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self._slots: dict[str, tuple[int, int]] = {}
        total = 0
        for name, size_bytes in sizes_bytes.items():
            self._slots[name] = (total, size_bytes)
            total += align_up(size_bytes, PAGE_BYTES)
        self._reader, self._writer = reader, writer
        self._file = _open(folder, total)
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Move | None]] = []
        self._threads: list[threading.Thread] = []
        for name, serve in (("write", self._write), ("read", self._read)):
            jobs: queue.SimpleQueue[_Move | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(jobs, serve), name=f"gascompile-spill-{name}", daemon=True
            )
            self._queues.append(jobs)
            self._threads.append(thread)
            thread.start()

    def write(self, name: str, storage: torch.UntypedStorage) -> Ticket:
        """Start copying a storage to its slot; it must not change or go before the ticket is done."""
        return self._submit(0, name, storage)

    def read(self, name: str, storage: torch.UntypedStorage) -> Ticket:
        """Start filling a storage from its slot; it must have the size that was written."""
        return self._submit(1, name, storage)

    def close(self) -> None:
        """Finish what is under way, stop the threads and give the file's space back; idempotent."""
        if self._closed:
            return
        self._closed = True
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._file)

    def _submit(self, direction: int, name: str, storage: torch.UntypedStorage) -> _Move:
        slot, size_bytes = self._slots[name]
        if storage.nbytes() > size_bytes:
            raise StorageError(
                f"'{name}' has {storage.nbytes()} bytes, its slot {size_bytes}; plan for the larger input"
            )
        move = _Move(slot, storage, name)
        if self._closed:
            raise StorageError("the session is closed; compile or load the model again")
        self._queues[direction].put(move)
        return move

    def _write(self, move: _Move, bounce: memoryview) -> None:
        source, size_bytes = _bytes_of(move.storage), move.storage.nbytes()
        for begin in range(0, size_bytes, len(bounce)):
            part = source[begin : begin + len(bounce)]
            bounce[: len(part)] = part
            whole = bounce[: align_up(len(part), PAGE_BYTES)]
            done = 0
            while done < len(whole):
                taken = self._writer(self._file, whole[done:], move.slot + begin + done)
                if taken <= 0:
                    raise OSError(errno.EIO, "a write took no bytes")
                done += taken

    def _read(self, move: _Move, bounce: memoryview) -> None:
        target, size_bytes = _bytes_of(move.storage), move.storage.nbytes()
        for begin in range(0, size_bytes, len(bounce)):
            part = target[begin : begin + len(bounce)]
            whole = bounce[: align_up(len(part), PAGE_BYTES)]
            done = 0
            while done < len(part):
                got = self._reader(self._file, whole[done:], move.slot + begin + done)
                if got <= 0:
                    raise OSError(errno.EIO, "the file ends before the tensor does")
                done += got
            part[:] = bounce[: len(part)]


def _serve(
    jobs: queue.SimpleQueue[_Move | None], work: Callable[[_Move, memoryview], None]
) -> None:
    bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
    while (move := jobs.get()) is not None:
        try:
            work(move, bounce)
        except OSError as error:
            move.error = StorageError(
                f"moving '{move.name}' failed: {error.strerror}; check the disk of the cache folder"
            )
            move.error.__cause__ = error
        move.ended.set()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def _open(folder: Path, size_bytes: int) -> int:
    """Return a new unnamed file of ``size_bytes``, for direct I/O where the file system allows it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made, name = tempfile.mkstemp(dir=folder, prefix=".spill-")
        try:
            if size_bytes:
                os.posix_fallocate(made, 0, size_bytes)
            try:
                return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                # Some file systems (tmpfs, some overlays) have no direct I/O; the page cache serves.
                return os.open(name, os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.unlink(name)
            os.close(made)
    except OSError as error:
        raise StorageError(
            f"cannot take {format_size(size_bytes)} in {folder} for activations: {error.strerror}; "
            "free some space, or choose another cache_dir"
        ) from error
