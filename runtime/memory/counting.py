"""Counts what torch's CPU allocator hands out to a run, and refuses what would be beyond its limit.

``counting.cpp`` says how. Not seen: what libraries take from elsewhere than torch's allocator, and what threads
take for a run that are neither its own nor workers of its parallel regions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

NO_LIMIT = (1 << 63) - 1  # the largest signed number of 64 bits


class _Figures(ctypes.Structure):
    _fields_ = [
        ("live_bytes", ctypes.c_int64),
        ("peak_bytes", ctypes.c_int64),
        ("wanted_bytes", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
    ]


class Count:
    """What one run has taken, and the context in which it runs. Its figures stay when it has ended."""

    def __init__(self, library: ctypes.PyDLL, run: object) -> None:
        """Know ``run``, a capsule of the library."""
        self._library = library
        self._run = run
        self._figures = _Figures()
        self.limit: Callable[[int], object] = partial(library.gascompile_count_limit, run)
        """Set another limit; native code, so that a ``finally`` that begins with it lifts one for certain."""
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    @property
    def live_bytes(self) -> int:
        """What is alive of what it took; results that outlive it included."""
        return int(self._read().live_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive since it began or since the last ``mark``."""
        return int(self._read().peak_bytes)

    @property
    def wanted_bytes(self) -> int:
        """What would have been alive with the block that it was refused last; 0 where it never was."""
        return int(self._read().wanted_bytes)

    @property
    def num_blocks(self) -> int:
        """How many blocks it was given."""
        return int(self._read().num_blocks)

    def mark(self) -> int:
        """Let ``peak_bytes`` begin anew; return what is alive."""
        alive_bytes: int = self._library.gascompile_count_mark(self._run)
        return alive_bytes

    def adjust(self, change_bytes: int) -> None:
        """Take note of memory that came from elsewhere, or that went though it was never counted."""
        self._library.gascompile_count_adjust(self._run, change_bytes)

    def size_of(self, address: int) -> int:
        """Return the bytes of the block that begins at ``address``; 0 if it is none of this run."""
        size_bytes: int = self._library.gascompile_count_size(self._run, address)
        return size_bytes

    def end(self) -> None:
        """Count nothing more."""
        self._read()
        self._library.gascompile_count_end(self._run)
        self._ended = True

    def _read(self) -> _Figures:
        if not self._ended:
            self._library.gascompile_count_read(self._run, ctypes.byref(self._figures))
        return self._figures


class Counter:
    """The counting half of torch's allocator; one per process."""

    def __init__(self, library: Path) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
        """
        # Calls are shorter than letting go of the interpreter would take, and make objects of it.
        self._library = ctypes.PyDLL(str(library))
        pointer, size, run = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
        for name, arguments, result in (
            ("install", [], ctypes.c_int),
            ("begin", [size, size], run),
            ("end", [run], None),
            ("limit", [run, size], None),
            ("read", [run, ctypes.POINTER(_Figures)], None),
            ("mark", [run], size),
            ("adjust", [run, size], None),
            ("size", [run, pointer], ctypes.c_size_t),
        ):
            function = getattr(self._library, f"gascompile_count_{name}")
            function.argtypes, function.restype = arguments, result

    def install(self) -> bool:
        """Become torch's allocator; False where another library has taken its place for good."""
        done: int = self._library.gascompile_count_install()
        return done == 0

    def counting(self, *, live_bytes: int = 0, limit_bytes: int = NO_LIMIT) -> Count:
        """Count what this thread takes, until the context that is returned ends.

        Args:
            live_bytes: what is alive already.
            limit_bytes: beyond so many alive bytes, an allocation raises ``torch.OutOfMemoryError``.
        """
        # Whoever drops the capsule ends the run: an interrupt between any two lines leaves no limit behind.
        return Count(self._library, self._library.gascompile_count_begin(live_bytes, limit_bytes))
