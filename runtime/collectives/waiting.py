"""Waiting: a thread that waits for transfers of a group, while the step looks at a clock.

Gloo tells of a transfer between two ranks that has ended only to who waits for it, for as long as the group lets it.
"""

from __future__ import annotations

import atexit
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from gascompile.runtime.collectives.group_work import LOOK_S

LEAVE_S = 2.0
"""What is received at all is on its way: the other rank needs it before it can leave, too."""


@dataclass(slots=True)
class Waiting:
    """Transfers under way that are waited for together."""

    works: Sequence[dist.Work]
    memory: mmap.mmap | None = None
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def ends(self, waits: Callable[[float], bool]) -> bool:
        """Wait for the end; return False where it is given up.

        Args:
            waits: says after so many seconds of waiting whether to wait on.

        Raises:
            RuntimeError: the other rank or the group is gone.
        """
        begin_s = time.monotonic()
        while not self.over.wait(LOOK_S):
            if not waits(time.monotonic() - begin_s):
                return False
        if self.error is not None:
            raise self.error
        return True


class WaitingThread:
    """Waits for transfers in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_wait_for, args=(self._queue,), daemon=True)
        _running[thread] = self._queue
        thread.start()

    def put(self, waiting: Waiting) -> None:
        """Wait for this one, too."""
        self._queue.put(waiting)

    def end(self) -> None:
        """End once all that was put here has ended."""
        self._queue.put(None)


_running: dict[threading.Thread, queue.SimpleQueue[Waiting | None]] = {}


def _wait_for(waiting: queue.SimpleQueue[Waiting | None]) -> None:
    while (item := waiting.get()) is not None:
        try:
            for work in item.works:
                work.wait()
        except BaseException as error:  # noqa: BLE001 - who has sent or waits raises it
            item.error = error
        item.over.set()
    _running.pop(threading.current_thread())


@atexit.register
def _end_all() -> None:
    """Let threads end before Python does: a wait of torch's that ends then ends the process, by ``terminate``."""
    until_s = time.monotonic() + LEAVE_S
    for thread, waiting in list(_running.items()):
        waiting.put(None)
        thread.join(max(until_s - time.monotonic(), 0))


def begun(work: dist.Work | None) -> dist.Work:
    """Return a transfer that has begun.

    Raises:
        RuntimeError: it has not.
    """
    if work is None:
        raise RuntimeError("this rank is not in the group")
    return work
