"""What the calling thread waits on, and threads of our own for what no signal may break off.

Python runs a signal's handler on the main thread, between any two of its instructions, and it may raise there.
``threading``'s conditions, events and threads are Python code: left half way, they keep a lock for ever. So the
threads here, which no handler runs on, own whatever is shared; who calls them leaves messages, each by one call of
C, and waits for gates. No own thread ever asks for a lock that a calling thread may hold. After a fork none of
these threads is there: a child waits for nothing of its parent's.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from gascompile.core.errors import ForkedError
from gascompile.core.patience import Watch, arrived

Result = TypeVar("Result")
Given = ParamSpec("Given")
Taking = TypeVar("Taking", bound="TakesTurns")
Request = TypeVar("Request")

LOOK_S = 0.2
"""Of a wait, between two looks: for signals that other threads were given, and past locks that a broken wait kept."""
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGPROF")
_MASKED = signal.valid_signals() - {getattr(signal, name) for name in _FAULTS}
"""Signals that are not for the thread they come up in: the main thread gets them all, and wakes up for them."""
_life = object()
"""Of this process; a child has another one."""


def life() -> object:
    """Return what tells this process from the one that it was forked from."""
    return _life


def require_life(made_in: object, what: str) -> None:
    """Raise ``ForkedError`` in a child of the process that ``what`` was made in."""
    if made_in is not _life:
        raise ForkedError(
            f"{what} belongs to the process that this one was forked from, as do its threads and files; make a new "
            "one in the child, or start processes by 'spawn'"
        )


class Gate:
    """Is closed, and then open for good. Opened by one thread, awaited by any number."""

    __slots__ = ("_life", "_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._life = _life
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let all through; to be called once."""
        self.is_open = True
        self._lock.release()

    def wait(self, watch: Watch | None = None) -> None:
        """Block until the gate is open.

        Args:
            watch: over a wait for a drive.

        Raises:
            ForkedError: it was to be opened by a thread of the parent's.
            StorageError: ``watch`` has given the wait up.
        """
        lock = self._lock
        while not self.is_open:
            require_life(self._life, "what is waited for")
            # Interrupted in between, the lock stays taken: others see the flag at their next look.
            if lock.acquire(timeout=LOOK_S):
                lock.release()
            elif watch is not None:
                watch()


class Turn:
    """Lets callers on several threads take turns; who has the turn may take it again."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _turns.add(self)

    def take(self, body: Callable[[], Result]) -> Result:
        """Return what ``body`` returns; whatever ends it, the turn is over then."""
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]  # as conditions ask
            return body()
        # No ``with``: Python 3.14 may be interrupted between the acquisition and the body.
        try:
            while not lock.acquire(timeout=LOOK_S):
                pass
            return body()
        finally:
            try:  # noqa: SIM105 - the release has to be the first call in here
                lock.release()
            except RuntimeError:
                pass  # interrupted while another thread had the turn

    def renew(self) -> None:
        """Forget who had the turn: a thread that is not in this process."""
        self._lock = threading.RLock()


class TakesTurns(Protocol):
    """An object some of whose methods take turns."""

    _turn: Turn


def in_turn(
    method: Callable[Concatenate[Taking, Given], Result],
) -> Callable[Concatenate[Taking, Given], Result]:
    """Have a method wait until no other thread is in one of its object's methods that take turns.

    Threads of ours work for who has the turn, and wait for nobody.
    """

    def taken(self: Taking, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if is_own_thread():
            return method(self, *args, **kwargs)
        return self._turn.take(partial(method, self, *args, **kwargs))

    update_wrapper(taken, method)
    return taken


class OwnThread:
    """A thread that no signal reaches. It does not keep the process from ending."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        """Start it; ``work`` must not raise."""
        self.name = name
        self._life = _life
        self._number = 0
        self._ended = Gate()
        # Not by ``threading``: its ``start`` waits for an event and, left half way, holds up the new thread.
        _thread.start_new_thread(self._run, (work,))

    @property
    def is_alive(self) -> bool:
        """Whether it is here and has not ended."""
        return self._life is _life and not self._ended.is_open

    def join(self, watch: Watch | None = None) -> None:
        """Block until it has ended; not in a child of its process, and not on itself. ``watch`` as a gate takes it."""
        if self._life is _life and self._number != _thread.get_ident():
            self._ended.wait(watch)

    def _run(self, work: Callable[[], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _MASKED)
        self._number = _thread.get_ident()
        _own[self._number] = self
        try:
            work()
        finally:
            del _own[self._number]
            self._number = 0
            self._ended.open()


def own_threads(prefix: str = "") -> list[str]:
    """Return the names of the own threads that are running."""
    return [thread.name for thread in list(_own.values()) if thread.name.startswith(prefix)]


def is_own_thread() -> bool:
    """Return whether the calling thread is one of these."""
    return _thread.get_ident() in _own


class Server(Protocol[Request]):
    """What the threads of a pool do with requests; only they call it."""

    def take(self, heap: list[tuple[int, int, Request]]) -> Callable[[], None] | None:
        """Return something to do for one of the requests, taken from the heap; one thread at a time."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request that has not been served whole; one thread at a time."""
        ...


class Pool(Generic[Request]):
    """Threads that serve requests by urgency. Heap and counts are theirs; callers leave messages."""

    def __init__(self, server: Server[Request], num_threads: int, name: str) -> None:
        """Prepare for so many threads; none begins before ``start``."""
        self._server = server
        self._num_threads, self._name = num_threads, name
        self._life = _life
        self._inbox: queue.SimpleQueue[tuple[int, int, Request] | Gate | None]
        self._inbox, self._bell = queue.SimpleQueue(), queue.SimpleQueue[None]()
        self._order = itertools.count()
        self.is_closed = False
        """Whether it takes no more requests."""
        self.threads: list[OwnThread] = []
        # From here on theirs.
        self._lock = _thread.allocate_lock()
        self._heap: list[tuple[int, int, Request]] = []
        self._drains: list[Gate] = []
        self.in_flight = 0
        """What is being served; none once a ``drain`` has returned."""
        self._ends = False

    def start(self) -> None:
        """Start the threads."""
        for i in range(self._num_threads):
            self.threads.append(OwnThread(self._work, f"{self._name}-{i}"))

    def put(self, key: int, request: Request, num_threads: int) -> None:
        """Queue a request, of use to so many threads; the smallest ``key`` first, equal ones in their order.

        Raises:
            ForkedError: the threads are the parent's.
        """
        require_life(self._life, "the session")
        self._inbox.put((key, next(self._order), request))
        for _ in range(min(num_threads, self._num_threads) - self._bell.qsize()):
            self._bell.put(None)

    @property
    def num_messages(self) -> int:
        """Requests and the like that no thread has taken note of yet."""
        return self._inbox.qsize()

    def drain(self) -> None:
        """Cancel what is queued, as soon as a thread is free, and block until nothing is being served."""
        if self.is_closed or self._life is not _life:
            self.close()
            return
        gate = Gate()
        self._inbox.put(gate)
        self._bell.put(None)
        gate.wait(Watch(f"the end of what {self._name} does"))

    def stop(self) -> None:
        """Cancel what is queued and let the threads end, without waiting for them."""
        self.is_closed = True
        self._inbox.put(None)
        self._bell.put(None)

    def close(self) -> None:
        """Stop and block until nothing is being served; idempotent, and to be repeated if interrupted."""
        self.stop()
        for thread in self.threads:
            thread.join(Watch(f"the end of {self._name}"))

    # ------------------------------------------------------------ own threads

    def _work(self) -> None:
        while not self._ends:
            task = self._next()
            if task is None:
                if not self._ends:
                    self._bell.get()
                continue
            task()
            # It may hold memory of the caller's, which must not live until the next one comes.
            del task
            arrived()
            with self._lock:
                self.in_flight -= 1
                self._open_drains()
        self._bell.put(None)

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            while not self._inbox.empty():
                self._obey(self._inbox.get())
            task = self._server.take(self._heap)
            if task is None:
                return None
            self.in_flight += 1
            # One bell may have stood for several messages: who finds more than its own wakes the next thread.
            if self._heap and self._bell.empty():
                self._bell.put(None)
            return task

    def _obey(self, message: tuple[int, int, Request] | Gate | None) -> None:
        if isinstance(message, tuple) and not self._ends:
            heapq.heappush(self._heap, message)
            return
        self._ends = self._ends or message is None
        if isinstance(message, tuple):
            self._server.cancel(message[2])
        for _, _, request in self._heap:
            self._server.cancel(request)
        self._heap.clear()
        if isinstance(message, Gate):
            self._drains.append(message)
            self._open_drains()

    def _open_drains(self) -> None:
        while self._drains and not self.in_flight:
            self._drains.pop().open()


_own: dict[int, OwnThread] = {}
_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _begin_anew() -> None:
    global _life  # noqa: PLW0603 - there is one process
    _life = object()
    _own.clear()
    for turn in list(_turns):
        turn.renew()


os.register_at_fork(after_in_child=_begin_anew)
