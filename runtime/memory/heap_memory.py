"""The C heap while iterations run: freed memory is kept for the next op, as long as the promise holds.

By default glibc gives large blocks back to the kernel when they are freed and takes new pages for the next op;
a new page costs more than most ops spend on its bytes. Kept instead, freed memory is used again, but holes
between blocks add up. They are given back whenever the process would otherwise outgrow its limit.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MMAPS = 65536
"""glibc's own limit of blocks that are mapped one by one."""
LARGE_BYTES = 256 << 10
"""Less is not looked at."""
_TRIM_BYTES = 128 << 10
"""glibc's own threshold, which is put back."""
_SLACK_BYTES = 16 << 20
"""By which memory grows before holes are looked for again: a look takes longer than a small op."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = "/proc/self/statm"


class HeapMemory:
    """Keeps freed memory between ``begin`` and ``end``; elsewhere than on glibc it does nothing."""

    def __init__(self) -> None:
        """Find the C library's functions."""
        library = ctypes.CDLL(None)
        has_all = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
        self._library = library if has_all and os.path.exists(_STATM) else None
        self.limit_bytes = 0
        """What the process may hold of its own."""
        self._trim_above_bytes = 0
        self.num_trims = 0

    def begin(self, limit_bytes: int) -> None:
        """Keep freed memory as long as the process holds no more than ``limit_bytes`` of its own."""
        self.limit_bytes = self._trim_above_bytes = limit_bytes
        if self._library is not None:
            self._library.mallopt(_M_MMAP_MAX, 0)
            self._library.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(-1))

    def make_room(self, size_bytes: int) -> None:
        """Give holes back if ``size_bytes`` more would pass the limit; too little to matter is not looked at."""
        if self._library is None or size_bytes < LARGE_BYTES:
            return
        if own_bytes() + size_bytes > self.limit_bytes:
            self._library.malloc_trim(ctypes.c_size_t(0))
            self.num_trims += 1

    def keep_within(self) -> None:
        """Give holes back if the process holds more than the limit."""
        if self._library is None:
            return
        if own_bytes() <= self._trim_above_bytes:
            return
        self.give_back()
        self.num_trims += 1
        # What is left is no hole; looking for some at each op would take longer than the op.
        self._trim_above_bytes = max(self.limit_bytes, own_bytes() + _SLACK_BYTES)

    def give_back(self) -> None:
        """Give all that is free to the kernel."""
        if self._library is not None:
            self._library.malloc_trim(ctypes.c_size_t(0))

    def end(self) -> None:
        """Return to glibc's defaults, and what is free to the kernel."""
        if self._library is not None:
            self._library.mallopt(_M_MMAP_MAX, _MMAPS)
            self._library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        self.give_back()


def own_bytes() -> int:
    """Return the process's memory that is no file's; 0 where the system does not say."""
    try:
        # Asked before each op: a file object would take several times as long. A fork has another file by this name.
        file = os.open(_STATM, os.O_RDONLY)
        try:
            _, resident, shared, *_ = os.read(file, 256).split()
        finally:
            os.close(file)
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES
