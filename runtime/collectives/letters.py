"""Letters: tensors that go from one rank to another, each under a tag; senders do not wait.

Gloo tells of a transfer that has ended only to who waits for it, for as long as the group lets it: threads wait, and
the step looks at a clock. What is sent is copied into memory beside torch's own, which plans keep free for it.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gascompile.core.strides import span_elements

_LOOK_S = 1.0
"""How often who waits looks whether there is still something to wait for."""
_LEAVE_S = 2.0
"""A letter that is received at all is on its way: the other rank needs it before it can leave, too."""


@dataclass(slots=True)
class _Waiting:
    """A transfer under way."""

    work: dist.Work
    memory: mmap.mmap | None = None
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Letters:
    """One rank's letters to and from the others of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Send and receive over ``group``."""
        self._group: dist.ProcessGroup | None = group
        self._sending: _Thread | None = None
        self._receiving: _Thread | None = None
        self._free: dict[int, list[mmap.mmap]] = {}
        self._sent: list[_Waiting] = []

    def leave(self) -> None:
        """Hold the group no longer, once what was sent is received, for a while; idempotent."""
        until_s = time.monotonic() + _LEAVE_S
        for waiting in self._sent:
            waiting.over.wait(max(until_s - time.monotonic(), 0))
        self._sent.clear()
        self._group = None
        for thread in (self._sending, self._receiving):
            if thread is not None:
                thread.end()
        self._sending = self._receiving = None
        self._free.clear()

    def send(self, value: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to send the memory of a tensor to rank ``peer`` of the group.

        Raises:
            RuntimeError: a letter before was not received, or the group is gone.
        """
        group = self._opened()
        self._require_sent()
        dense = _dense(value)
        size_bytes = dense.numel() * dense.element_size()
        if not size_bytes:
            return
        memory = self._memory(size_bytes)
        letter = torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes)
        letter.copy_(_bytes(dense))
        work = dist.isend(letter, group=group, tag=tag, group_dst=peer)
        if self._sending is None:
            self._sending = _Thread()
        waiting = _Waiting(_begun(work), memory)
        self._sent.append(waiting)
        self._sending.put(waiting)

    def _require_sent(self) -> None:
        """Take memory back of what has been received."""
        for waiting in [w for w in self._sent if w.over.is_set()]:
            if waiting.error is not None:
                raise waiting.error
            self._sent.remove(waiting)
            if waiting.memory is not None:
                self._free.setdefault(len(waiting.memory), []).append(waiting.memory)

    def _memory(self, size_bytes: int) -> mmap.mmap:
        free = self._free.get(size_bytes)
        if free:
            return free.pop()
        # Of another size: plans keep room for what is under way at once, and no more.
        self._free.clear()
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def receive(
        self, values: torch.Tensor, peer: int, tag: int, waits: Callable[[float], bool]
    ) -> bool:
        """Fill a tensor with what rank ``peer`` has sent; return False where it is given up.

        Args:
            values: the tensor.
            peer: the rank.
            tag: of the letter.
            waits: says after so many seconds of waiting whether to wait on.

        Raises:
            RuntimeError: the other rank or the group is gone.
        """
        group = self._opened()
        if not values.numel():
            return True
        dense = _dense(values)
        own = _bytes(dense)
        work = dist.irecv(_unowned(own), group=group, tag=tag, group_src=peer)
        if self._receiving is None:
            self._receiving = _Thread()
        waiting = _Waiting(_begun(work))
        self._receiving.put(waiting)
        begin_s = time.monotonic()
        while not waiting.over.wait(_LOOK_S):
            if not waits(time.monotonic() - begin_s):
                return False
        if waiting.error is not None:
            raise waiting.error
        if dense is not values:
            values.copy_(dense)
        return True

    def _opened(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        return self._group


class _Thread:
    """Waits for transfers in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_wait_for, args=(self._queue,), daemon=True)
        _running[thread] = self._queue
        thread.start()

    def put(self, waiting: _Waiting) -> None:
        self._queue.put(waiting)

    def end(self) -> None:
        self._queue.put(None)


_running: dict[threading.Thread, queue.SimpleQueue[_Waiting | None]] = {}


def _wait_for(waiting: queue.SimpleQueue[_Waiting | None]) -> None:
    while (item := waiting.get()) is not None:
        try:
            item.work.wait()
        except BaseException as error:  # noqa: BLE001 - who has sent or waits raises it
            item.error = error
        item.over.set()
    _running.pop(threading.current_thread())


@atexit.register
def _end_all() -> None:
    """Let threads end before Python does: a wait of torch's that ends then ends the process, by ``terminate``."""
    until_s = time.monotonic() + _LEAVE_S
    for thread, waiting in list(_running.items()):
        waiting.put(None)
        thread.join(max(until_s - time.monotonic(), 0))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group")
    return work


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements fill its memory: this one, or a copy."""
    is_dense = span_elements(tuple(value.shape), value.stride()) == value.numel()
    if value.device.type == "cpu" and is_dense:
        return value
    return value.to("cpu", copy=True).contiguous()


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    flat = dense.detach().as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8)


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a vector of the same memory that does not keep it: a thread lets go of it a moment after its end."""
    size_bytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)
