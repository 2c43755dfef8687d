"""Attempt: work that goes on to its end in an own thread, whoever waits for it and is interrupted."""

from __future__ import annotations

import _thread
from collections.abc import Callable

from gascompile.core.waiting import Gate, OwnThread


class Attempt:
    """Is made once, by the first of the threads that begin it."""

    def __init__(self) -> None:
        """Begin nothing yet."""
        self.error: BaseException | None = None
        self.is_asked = False
        """Whether somebody wants it made, and may have been interrupted before a thread began."""
        self._claim, self._gate = _thread.allocate_lock(), Gate()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in an error or not."""
        return self._gate.is_open

    def claim(self) -> bool:
        """Return whether the calling thread is the first."""
        return self._claim.acquire(blocking=False)

    def end(self) -> None:
        """Let those who wait go on; the first thread calls it, once."""
        self._gate.open()

    def wait(self) -> None:
        """Block until it has ended."""
        self._gate.wait()


def begin(work: Callable[[], None]) -> None:
    """Do ``work``, which does not raise, in an own thread; here, where the process ends and starts no more."""
    try:
        OwnThread(work, "gascompile-close")
    except RuntimeError:
        work()
