"""Work done by several threads at once, for calls into C that let go of Python's lock."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gascompile.core.waiting import Gate, OwnThread

Result = TypeVar("Result")

MAX_THREADS = 8
"""More than these wait for the memory, or for the drive."""
_AHEAD = 2  # pieces of work that wait for a thread, so that none waits for the caller


class _Job(Generic[Result]):
    """One piece of work."""

    __slots__ = ("error", "gate", "results", "work")

    def __init__(self, work: Callable[[], Result]) -> None:
        self.work: Callable[[], Result] | None = work
        self.results: list[Result] = []
        self.error: BaseException | None = None
        self.gate = Gate()

    def run(self) -> None:
        try:
            if self.work is not None:
                self.results.append(self.work())
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self.error = error
        # It may hold memory of the caller's.
        self.work = None
        self.gate.open()

    def result(self) -> Result:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.results[0]


def in_order(
    works: Iterable[Callable[[], Result]],
    take: Callable[[Result], object],
    num_threads: int | None = None,
) -> None:
    """Do each of ``works`` on one of several threads, none of which is left when this returns or raises.

    Args:
        works: asked for by the caller's thread, not much before they are done.
        take: gets the results in the order of ``works``, on the caller's thread.
        num_threads: at most; by default as many as the process has cores, and no more than ``MAX_THREADS``.

    Raises:
        BaseException: what the first of ``works`` that failed has raised; later ones may not have been done.
    """
    if num_threads is None:
        num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    if num_threads < 2:
        for work in works:
            take(work())
        return
    asked = queue.SimpleQueue[_Job[Result] | None]()
    waiting: deque[_Job[Result]] = deque()
    threads: list[OwnThread] = []
    try:
        for work in works:
            if len(waiting) == num_threads + _AHEAD:
                take(waiting.popleft().result())
            waiting.append(_Job(work))
            del work  # it is let go of once it is done
            asked.put(waiting[-1])
            if len(threads) < num_threads:
                threads.append(OwnThread(lambda: _serve(asked), f"gascompile-side-{len(threads)}"))
        while waiting:
            take(waiting.popleft().result())
    finally:
        for job in waiting:
            job.work = None  # not begun, it is not done any more
        for _ in range(num_threads):
            asked.put(None)
        for thread in threads:
            thread.join()


def _serve(asked: queue.SimpleQueue[_Job[Result] | None]) -> None:
    while (job := asked.get()) is not None:
        job.run()
        del job  # not kept while the next one is awaited
