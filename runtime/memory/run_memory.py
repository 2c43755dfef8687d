"""Where the ops of runs take their memory: a policy of a session.

Without one, ops take it from torch's allocator as it is. With one, freed memory is kept for the next op within the
budget, and large values lie in pages that any other may use again.
"""

from __future__ import annotations

from collections.abc import Callable

from gascompile.runtime.memory.heap_memory import LARGE_BYTES, HeapMemory, own_bytes
from gascompile.runtime.memory.pages import Pages

_EVERY = 64
"""Small blocks add up, too: after so many of them it is looked for holes. [Empirical] A look takes 12 us, as three
small ops do."""
_TAKEN_BYTES = 4 << 20
"""And not before ops have taken so much, a quarter of what the heap may grow by between two looks."""


class RunMemory:
    """The heap of a session's runs, and the pages beside it."""

    def __init__(self, pages: Pages | None) -> None:
        """Change nothing yet; without ``pages`` large values lie on the heap, too."""
        self._pages, self._heap = pages, HeapMemory()
        self.serve: Callable[[int], object] = bool if pages is None else pages.activate
        """Let this thread's large values lie in pages, or no more: native code, which nothing interrupts."""
        self._num_small = self._taken_bytes = 0

    def lane(self) -> Callable[[int], object]:
        """Return what ``serve`` is to the thread of ops that run on the host beside a device's, in the run at hand."""
        return bool

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
        is_large = size_bytes >= LARGE_BYTES
        if is_large and self._pages is None:
            return True
        self._num_small += 1
        self._taken_bytes += size_bytes
        if (self._num_small < _EVERY and not is_large) or self._taken_bytes < _TAKEN_BYTES:
            return False
        self._num_small = self._taken_bytes = 0
        return True

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


class SiteMemory(RunMemory):
    """Memory of ops that run on the host beside those of a device: pages for the host's, and for a device's in RAM.

    Threads that take blocks from the C heap and free them at once make it give memory back and take it anew all the
    time. [Empirical] 5,000 new pages per call, a tenth of the processors' time, where one thread alone takes none.
    """

    def __init__(self, pages: Pages, held_bytes: int, *, in_ram: bool) -> None:
        """Change nothing yet.

        Args:
            pages: where large values lie.
            held_bytes: of free pages and those in use, what is kept; a plan's peaks of what ops take.
            in_ram: whether what the device's ops take is the host's memory.
        """
        super().__init__(pages if in_ram else None)
        self._held_pages, self._held_bytes = pages, held_bytes

    def lane(self) -> Callable[[int], object]:
        """Join free pages from here on rather than hold more than the plan's ops take; return what serves a thread."""
        self._held_pages.limit(self._held_bytes)
        return self._held_pages.activate

    def begin(self, limit_bytes: int) -> None:
        """Change nothing: what is kept is in pages."""

    def limit_pages(self, peak_bytes: int) -> None:
        """Change nothing: the limit is that of both processors."""

    def is_due(self, size_bytes: int) -> bool:
        """Return False: nothing has to be given back before an op of any size."""
        return size_bytes < 0

    def make_room(self, size_bytes: int) -> None:
        """Change nothing."""

    def end(self) -> None:
        """Give what is free to the kernel."""
        self._held_pages.trim()
