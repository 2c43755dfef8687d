"""Memory of training steps: blocks of whole pages that are used again for blocks of any size.

``pages.cpp`` says how; this module loads its library and speaks to it. There is one such memory per process,
as there is one allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gascompile.core.own_files import load_own
from gascompile.core.sizes import PAGE_BYTES
from gascompile.runtime.transfer.page_ring import RingLane

_MOST_UNITS = 1 << 18
"""Of a budget: finer ones would be cut into more mappings than a kernel likes to have."""
_LEAST_UNITS = 16
"""Of a block, so that rounding its size up costs little."""


class _Figures(ctypes.Structure):
    _fields_ = [
        ("live_bytes", ctypes.c_uint64),
        ("peak_live_bytes", ctypes.c_uint64),
        ("resident_bytes", ctypes.c_uint64),
        ("num_joined", ctypes.c_uint64),
        ("moved_bytes", ctypes.c_uint64),
    ]


class Pages:
    """The process's page memory. Blocks are taken from it within ``active`` only, by that thread."""

    def __init__(self, library: Path) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
        StorageError: it could be another user's work.
        """
        self._library = load_own(library)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        for name, arguments, result in (
            ("install", [size, size], ctypes.c_int),
            ("activate", [ctypes.c_int], None),
            ("limit", [size], None),
            ("adopt", [pointer], None),
            ("capacity", [pointer], size),
            ("trim", [], None),
            ("mark", [], None),
            ("figures", [ctypes.POINTER(_Figures)], None),
        ):
            function = getattr(self._library, f"gascompile_pages_{name}")
            function.argtypes, function.restype = arguments, result
        self.activate: Callable[[int], object] = self._library.gascompile_pages_activate
        """Serve this thread's large blocks, or no more: native code, which nothing interrupts."""

    def install(self, budget_bytes: int) -> bool:
        """Become torch's allocator, in units that suit the budget; False where the kernel cannot move pages."""
        unit_bytes = PAGE_BYTES
        while unit_bytes * _MOST_UNITS < budget_bytes:
            unit_bytes *= 2
        least_bytes = _LEAST_UNITS * unit_bytes
        done: int = self._library.gascompile_pages_install(unit_bytes, least_bytes)
        return done == 0

    @contextlib.contextmanager
    def active(self, limit_bytes: int) -> Iterator[None]:
        """Serve this thread's large blocks; join free pages rather than hold more than ``limit_bytes``."""
        self.limit(limit_bytes)
        self.activate(1)
        try:
            yield
        finally:
            self.activate(0)

    def limit(self, limit_bytes: int) -> None:
        """Join free pages rather than hold more."""
        self._library.gascompile_pages_limit(max(limit_bytes, 0))

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Let a storage take its next memory from where its thread's new tensors get theirs."""
        self._library.gascompile_pages_adopt(storage._cdata)

    def capacity(self, address: int) -> int:
        """Return how many bytes from ``address`` on belong to the block that begins there; 0 if none does."""
        size_bytes: int = self._library.gascompile_pages_capacity(address)
        return size_bytes

    def lane(self) -> RingLane:
        """Return a new thread that moves blocks to files, or back.

        Raises:
            StorageError: the system has no thread left.
        """
        return RingLane(self._library)

    def trim(self) -> None:
        """Give what is free to the kernel, and what is freed until blocks are served again."""
        self._library.gascompile_pages_trim()

    @property
    def resident_bytes(self) -> int:
        """What blocks hold, those that are free included."""
        return int(self._figures().resident_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at once since the last ``mark``."""
        return int(self._figures().peak_live_bytes)

    @property
    def live_bytes(self) -> int:
        """What is in use."""
        return int(self._figures().live_bytes)

    def mark(self) -> int:
        """Let ``peak_bytes`` begin anew, and return what is in use."""
        self._library.gascompile_pages_mark()
        return self.live_bytes

    @property
    def moved_bytes(self) -> int:
        """Pages that went from one block to another so far."""
        return int(self._figures().moved_bytes)

    def _figures(self) -> _Figures:
        figures = _Figures()
        self._library.gascompile_pages_figures(ctypes.byref(figures))
        return figures
