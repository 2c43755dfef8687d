"""Work that an own thread does to its end, whoever asked for it and is interrupted, or drops what it is of."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable

from gascompile.core.waiting import Gate, OwnThread, is_own_thread, life


class _Request:
    """One piece of work."""

    __slots__ = ("error", "gate", "is_last", "work")

    def __init__(self, work: Callable[[], object], *, is_last: bool) -> None:
        self.is_last = is_last
        self.work: Callable[[], object] = work
        self.error: BaseException | None = None
        self.gate = Gate()


class OwnWork:
    """Does what it is told, one thing after the other. It ends with its owner, or when it is told so."""

    def __init__(self, name: str, owner: object) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            owner: what the work is of; nothing here keeps it.
        """
        self._life = life()
        self.when_dropped: Callable[[], object] | None = None
        """What is still to be done once there is no owner; it must not know the owner."""
        self._asked = queue.SimpleQueue[object]()
        self._latest: _Request | None = None
        self._ended = Gate()
        # A call of C, and so one that no interrupt comes before: a finalizer in Python may be broken off.
        self._owner = weakref.ref(owner, self._asked.put)
        self._thread: OwnThread | None = None
        self._thread = OwnThread(self._run, name)

    def do(self, work: Callable[[], object], *, is_last: bool = False) -> None:
        """Have something done and block until it is; an interrupt is raised when it is, a second one at once.

        Not in a child of a fork, where the caller does it, and not on an own thread, which may be what it waits for.

        Args:
            work: to do.
            is_last: whether the thread ends then, unless this raises.

        Raises:
            BaseException: what the work has raised.
        """
        if self._life is not life() or self._has_ended():
            work()
            return
        request = _Request(work, is_last=is_last)
        self._latest = request
        self._asked.put(request)
        if is_own_thread():
            return
        if self._has_ended() and self._thread is not None:
            # It may have looked for the last time before this was there.
            self._thread.join()
            if not request.gate.is_open:
                work()
                return
        try:
            request.gate.wait()
        except BaseException:
            request.gate.wait()
            raise
        if request.error is not None:
            raise request.error
        if is_last and self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Block until what was asked for last is done; nothing else happens meanwhile to what it works on."""
        if self._latest is None or self._life is not life():
            return
        if not self._latest.gate.is_open:
            # Not for that one: an interrupt may have come before it was asked for.
            self.do(bool)
        self._latest = None

    def _has_ended(self) -> bool:
        return self._ended.is_open

    def _run(self) -> None:
        while not self._ended.is_open:
            if self._served(self._asked.get()):
                self.when_dropped = None
                self._ended.open()
        # Who looked before the end has asked by now.
        while not self._asked.empty():
            self._served(self._asked.get())

    def _served(self, asked: object) -> bool:
        """Serve a request, or the message that the owner is gone; return whether that was the last."""
        if not isinstance(asked, _Request):
            asked = _Request(self.when_dropped or bool, is_last=True)
            self._latest = asked
        try:
            asked.work()
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            asked.error = error
        # It may hold memory of the caller's.
        asked.work = bool
        asked.gate.open()
        return asked.is_last and (asked.error is None or self._owner() is None)
