"""Memory for an arena, taken from the kernel in the background while the model is captured and planned.

The first touch of a page costs the kernel a cleared page, on virtual machines much more; a gigabyte
takes from a tenth of a second to several seconds. Started early, that time is not waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterator

from gascompile.core.huge_pages import map_anonymous
from gascompile.core.waiting import Gate, OwnThread

_wishes: dict[int, object] = {}
"""Of those who want no pages to be taken for now."""
_steps: dict[int, Gate] = {}
"""What is being taken, by whom; each looks for wishes once it is in here."""
_PAUSE_S = 0.005  # between looks for wishes
_STEP_BYTES = 2 << 20
"""One huge page: who wishes that no pages are taken waits for at most that."""


@contextlib.contextmanager
def no_pages_taken() -> Iterator[None]:
    """Let no thread of this process take memory early meanwhile: it would use up a processor.

    Whoever takes the memory over meanwhile waits for none of it.
    """
    wish = object()
    _wishes[id(wish)] = wish
    try:
        for step in list(_steps.values()):
            step.wait()
        yield
    finally:
        _wishes.pop(id(wish), None)


class EarlyMemory:
    """Memory that is being filled with pages by a thread until somebody takes it."""

    def __init__(self, limit_bytes: int) -> None:
        """Start to take ``limit_bytes``, in order of address."""
        self._memory = map_anonymous(limit_bytes)
        self._size_bytes = limit_bytes
        self._stop = False
        self._thread = OwnThread(self._populate, "early-memory")

    def take(self, size_bytes: int) -> mmap.mmap | None:
        """Return memory of exactly ``size_bytes``, or ``None`` when there is not enough; the rest is given back."""
        self._finish()
        if size_bytes > self._size_bytes or self._memory.closed:
            self.discard()
            return None
        self._memory.resize(max(size_bytes, 1))
        return self._memory

    def discard(self) -> None:
        """Give all of it back; for a plan that was not made."""
        self._finish()
        self._memory.close()

    def _finish(self) -> None:
        self._stop = True
        self._thread.join()

    def _populate(self) -> None:
        anchor = ctypes.c_char.from_buffer(self._memory)
        start = ctypes.addressof(anchor)
        try:
            for offset in range(0, self._size_bytes, _STEP_BYTES):
                if not self._may_step():
                    break
                # By writing: asked for them by madvise(), the kernel lets no other thread map memory meanwhile, which
                # took a tenth of the time in which a kept plan is read. It is zero as it was.
                ctypes.memset(start + offset, 0, min(_STEP_BYTES, self._size_bytes - offset))
        finally:
            self._end_step()
            del anchor  # an exported buffer cannot be resized

    def _may_step(self) -> bool:
        """Block while anybody wishes so; return whether to go on."""
        self._end_step()
        while not self._stop:
            _steps[id(self)] = Gate()
            if not _wishes:
                return True
            self._end_step()
            time.sleep(_PAUSE_S)
        return False

    def _end_step(self) -> None:
        step = _steps.pop(id(self), None)
        if step is not None:
            step.open()
