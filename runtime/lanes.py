"""Lanes: moves of whole pages between memory and files, in order, by threads of the native library.

``transfers.cpp`` says how; a move costs the interpreter its submission and nothing after it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gascompile.errors import StorageError

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
        ("ended", ctypes.c_int32),
    ]


class LaneMove:
    """A transfer under way; a ``Ticket``. Its lane keeps it until it has ended."""

    event: Event | None = None
    """None: the bytes are in place once the move has ended."""

    def __init__(self, lane: Lane, storage: torch.UntypedStorage, name: str) -> None:
        self.outcome = _Outcome()
        self.name = name
        self._lane = lane
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
    def done(self) -> bool:
        return bool(self.outcome.ended)

    @property
    def failed(self) -> bool:
        return self.done and self.outcome.error != 0

    def let_go(self) -> None:
        """Hold the memory no longer, so that the last reader of the tensor frees it."""
        self._storage = None

    def wait(self) -> None:
        self._lane.wait(self)
        self.let_go()
        code = self.outcome.error
        if code < 0:
            raise StorageError(
                f"moving '{self.name}' failed: the file ends before the tensor does; plan again"
            )
        if code:
            error = OSError(code, os.strerror(code))
            raise StorageError(
                f"moving '{self.name}' failed: {error.strerror}; check the disk of the cache folder"
            ) from error


class Lane:
    """One thread of the library. For one submitting thread; close it when no move is needed any more."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Start the thread.

        Raises:
            StorageError: the system has no thread left.
        """
        declare(library)
        self._library = library
        self._lane: int | None = library.gascompile_lane_open()
        if not self._lane:
            raise StorageError("no thread for transfers can be had; see the limits of this user")
        self._flying: deque[LaneMove] = deque()

    def submit(
        self,
        name: str,
        storage: torch.UntypedStorage,
        file: int,
        offset: int,
        *,
        writes: bool,
        size_bytes: int,
    ) -> LaneMove:
        """Start moving ``size_bytes`` from the beginning of a storage on, of which it may fill fewer."""
        for ended in self._ended():
            ended.let_go()
        move = LaneMove(self, storage, name)
        self._flying.append(move)
        needed = size_bytes if writes else storage.nbytes()
        where = storage.data_ptr(), size_bytes, needed, offset
        self._library.gascompile_lane_submit(
            self._lane, file, writes, *where, ctypes.byref(move.outcome)
        )
        return move

    def _ended(self) -> Iterator[LaneMove]:
        while self._flying and self._flying[0].done:
            yield self._flying.popleft()

    def wait(self, move: LaneMove) -> None:
        """Block until a move has ended, whatever became of it."""
        while not move.done:
            self._library.gascompile_lane_wait(self._lane, ctypes.byref(move.outcome), _LOOK_S)

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        for move in self._flying:
            self.wait(move)
            move.let_go()
        self._flying.clear()

    def close(self) -> None:
        """Finish what is under way and stop the thread; idempotent."""
        if self._lane:
            lane, self._lane = self._lane, None
            self._library.gascompile_lane_close(lane)
            self._flying.clear()


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the library's functions take and return."""
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    outcome = ctypes.POINTER(_Outcome)
    for name, arguments, result in (
        ("open", [], pointer),
        ("submit", [pointer, number, number, pointer, size, size, ctypes.c_int64, outcome], None),
        ("wait", [pointer, outcome, ctypes.c_double], number),
        ("close", [pointer], None),
    ):
        function = getattr(library, f"gascompile_lane_{name}")
        function.argtypes, function.restype = arguments, result
