"""Where the ops of runs take their memory: a policy of a session.

Without one, ops take it from torch's allocator as it is. With one, freed memory is kept for the next op within the
budget, and large values lie in pages that any other may use again.
"""

from __future__ import annotations

from collections.abc import Callable

from gascompile.runtime.memory.heap_memory import LARGE_BYTES, HeapMemory, own_bytes
from gascompile.runtime.memory.pages import Pages

_EVERY = 64
"""Small blocks add up, too."""


class RunMemory:
    """The heap of a session's runs, and the pages beside it."""

    def __init__(self, pages: Pages | None) -> None:
        """Change nothing yet; without ``pages`` large values lie on the heap, too."""
        self._pages, self._heap = pages, HeapMemory()
        self.serve: Callable[[int], object] = bool if pages is None else pages.activate
        """Let this thread's large values lie in pages, or no more: native code, which nothing interrupts."""
        self._num_small = 0

    def begin(self, limit_bytes: int) -> None:
        """Keep freed memory as long as the process grows by no more than ``limit_bytes`` from here on."""
        self._heap.give_back()
        self._heap.begin(own_bytes() + limit_bytes)

    def limit_pages(self, peak_bytes: int) -> None:
        """Join free pages rather than hold more than a run of ``peak_bytes`` needs, or than there is room for."""
        if self._pages is None:
            return
        # What is not in blocks of pages was taken by now: small values, and the holes between them.
        beside_bytes = own_bytes() - self._pages.resident_bytes
        self._pages.limit(min(self._heap.limit_bytes - beside_bytes, peak_bytes))

    def is_due(self, size_bytes: int) -> bool:
        """Return whether room is to be made before an op that takes so much; asked once per op."""
        self._num_small += 1
        return size_bytes >= LARGE_BYTES or self._num_small % _EVERY == 0

    def make_room(self, size_bytes: int) -> None:
        """Be about to take memory; pages have no holes, but small values beside them may leave some."""
        if self._pages is None:
            self._heap.make_room(size_bytes)
        else:
            self._heap.keep_within()

    def end(self) -> None:
        """Give all that is kept to the kernel; idempotent, and a ``begin`` may follow."""
        self._heap.end()
        if self._pages is not None:
            self._pages.trim()
