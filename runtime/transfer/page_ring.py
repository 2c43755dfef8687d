"""Lanes: moves of whole pages between memory and files, in order, by threads of the native library.

``transfers.cpp`` says how; a move costs the interpreter its submission and nothing after it. A signal may raise
between any two lines here, and a process may be forked at any time: neither may leave native code with memory
that is somebody else's, or a wait that never ends.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from gascompile.core.errors import StorageError
from gascompile.core.patience import Watch, arrived

if TYPE_CHECKING:
    import torch

    from gascompile.runtime.protocols import Event

_LOOK_S = 0.2
"""Of a wait in native code, between two looks for signals."""


class _Outcome(ctypes.Structure):
    _fields_ = [
        ("begun_s", ctypes.c_double),
        ("done_s", ctypes.c_double),
        ("error", ctypes.c_int32),
        ("submitted", ctypes.c_int32),
        ("ended", ctypes.c_int32),
    ]


class _Thread:
    """The native side: a thread of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        _declare(library)
        self._library = library
        self._handle = ctypes.c_void_p(library.gascompile_lane_open())
        self._process = os.getpid()
        self.is_hung = False
        """Whether a wait for it was given up: nothing that it may use is given back."""
        if self._handle.value is None:
            raise StorageError("no thread for transfers can be had; see the limits of this user")

    @property
    def is_open(self) -> bool:
        return self._handle.value is not None and self._process == os.getpid()

    def submit(
        self,
        outcome: _Outcome,
        file: int,
        address: int,
        sizes: tuple[int, int],
        offset: int,
        *,
        writes: bool,
    ) -> None:
        if not self.is_open:
            raise StorageError("the threads for transfers are closed, or those of another process")
        self._library.gascompile_lane_submit(
            self._handle, file, writes, address, *sizes, offset, ctypes.byref(outcome)
        )

    def wait(self, outcome: _Outcome) -> None:
        """Block until a move that was submitted has ended."""
        watch, was_over = None, bool(outcome.ended)
        while self.is_open and not self._library.gascompile_lane_wait(
            self._handle, ctypes.byref(outcome), _LOOK_S
        ):
            watch = watch or Watch("a transfer of pages")
            try:
                watch()
            except StorageError:
                self.is_hung = True
                raise
        self.is_hung = False
        if not was_over:
            arrived()
        if not outcome.ended:
            raise StorageError(
                "a transfer was under way when this process was forked; it is its parent's"
            )

    def close(self) -> None:
        if self.is_open:
            self._library.gascompile_lane_close(ctypes.byref(self._handle))


class LaneMove:
    """A transfer under way; a ``Ticket``. Its lane keeps it until it has ended."""

    event: Event | None = None
    """None: the bytes are in place once the move has ended."""

    def __init__(self, thread: _Thread, storage: torch.UntypedStorage, name: str) -> None:
        self.outcome = _Outcome()
        self.name = name
        self._thread = thread
        self._storage: torch.UntypedStorage | None = storage

    @property
    def begun_s(self) -> float:
        """When it began, by ``time.perf_counter``."""
        return float(self.outcome.begun_s)

    @property
    def done_s(self) -> float:
        """When it ended, by the same clock."""
        return float(self.outcome.done_s)

    @property
    def is_under_way(self) -> bool:
        """Whether native code may use its memory."""
        return bool(self.outcome.submitted and not self.outcome.ended)

    @property
    def done(self) -> bool:
        return bool(self.outcome.ended)

    @property
    def failed(self) -> bool:
        return self.done and self.outcome.error != 0

    def let_go(self) -> None:
        """Hold the memory no longer, so that the last reader of the tensor frees it."""
        self._storage = None

    def wait(self) -> None:
        self._thread.wait(self.outcome)
        self.let_go()
        code = self.outcome.error
        if code < 0:
            raise StorageError(
                f"moving '{self.name}' failed: the file ends before the tensor does; plan again"
            )
        if code:
            error = OSError(code, os.strerror(code))
            raise StorageError(
                f"moving '{self.name}' failed: {error.strerror}; check the drives of the cache folder and of the "
                "weights"
            ) from error


class _Timed(Protocol):
    """A move that knows its times."""

    @property
    def begun_s(self) -> float: ...

    @property
    def done_s(self) -> float: ...

    @property
    def done(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def wait(self) -> None: ...


class LaneMoves:
    """Moves that follow each other in a lane, as one ``Ticket``."""

    event: Event | None = None

    def __init__(self, moves: Sequence[_Timed]) -> None:
        """Take at least one, in the order in which they were submitted."""
        self._moves = moves

    @property
    def begun_s(self) -> float:
        """When the first began."""
        return self._moves[0].begun_s

    @property
    def done_s(self) -> float:
        """When the last ended."""
        return self._moves[-1].done_s

    @property
    def done(self) -> bool:
        return self._moves[-1].done

    @property
    def failed(self) -> bool:
        return any(move.failed for move in self._moves)

    def wait(self) -> None:
        for move in self._moves:
            move.wait()


class RingLane:
    """One thread of the library. For one submitting thread; close it when no move is needed any more."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Start the thread.

        Raises:
            StorageError: the system has no thread left.
        """
        self._thread = _Thread(library)
        self._flying: deque[LaneMove] = deque()
        # Whoever drops a lane unclosed leaves memory in use behind: it stays until the last move has ended.
        weakref.finalize(self, _abandon, self._thread, self._flying).atexit = False

    def submit(
        self,
        name: str,
        storage: torch.UntypedStorage,
        file: int,
        offset: int,
        *,
        writes: bool,
        size_bytes: int,
        begin: int = 0,
    ) -> LaneMove:
        """Start moving ``size_bytes`` from byte ``begin`` of a storage on, of which it may fill fewer.

        What is read may lie anywhere in its file; what is written begins at a page of both.

        Raises:
            StorageError: the lane is closed.
        """
        while self._flying and not self._flying[0].is_under_way:
            self._flying.popleft().let_go()
        move = LaneMove(self._thread, storage, name)
        # Before it is under way: an interrupt in between leaves one that never was.
        self._flying.append(move)
        needed = size_bytes if writes else min(size_bytes, storage.nbytes() - begin)
        address = storage.data_ptr() + begin
        self._thread.submit(
            move.outcome, file, address, (size_bytes, needed), offset, writes=writes
        )
        return move

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        for move in self._flying:
            if move.is_under_way and self._thread.is_open:
                self._thread.wait(move.outcome)
            move.let_go()
        self._flying.clear()

    def close(self) -> None:
        """Finish what is under way and stop the thread; idempotent, and to be repeated if interrupted."""
        self.drain()
        self._thread.close()


def _abandon(thread: _Thread, flying: deque[LaneMove]) -> None:
    """Close the thread of a lane that nobody has any more, and let its memory go after that."""
    if thread.is_hung:
        # Its end may never come, and until then it may write to that memory.
        _kept.append((thread, flying))
        return
    thread.close()
    flying.clear()


_kept: list[tuple[_Thread, deque[LaneMove]]] = []


def _declare(library: ctypes.CDLL) -> None:
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    outcome = ctypes.POINTER(_Outcome)
    for name, arguments, result in (
        ("open", [], pointer),
        ("submit", [pointer, number, number, pointer, size, size, ctypes.c_int64, outcome], None),
        ("wait", [pointer, outcome, ctypes.c_double], number),
        ("close", [ctypes.POINTER(pointer)], None),
    ):
        function = getattr(library, f"gascompile_lane_{name}")
        function.argtypes, function.restype = arguments, result
