"""Letters: tensors that go from one rank to another, each under a tag; senders do not wait.

What is sent is copied into memory beside torch's own, which plans keep free for it.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from gascompile.core.strides import span_elements
from gascompile.runtime.collectives.group_work import unowned
from gascompile.runtime.collectives.waiting import LEAVE_S, Waiting, WaitingThread, begun


class Letters:
    """One rank's letters to and from the others of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Send and receive over ``group``."""
        self._group: dist.ProcessGroup | None = group
        self._sending: WaitingThread | None = None
        self._receiving: WaitingThread | None = None
        self._free: dict[int, list[mmap.mmap]] = {}
        self._sent: list[Waiting] = []

    def leave(self) -> None:
        """Hold the group no longer, once what was sent is received, for a while; idempotent."""
        until_s = time.monotonic() + LEAVE_S
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
            self._sending = WaitingThread()
        waiting = Waiting([begun(work)], memory)
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
        work = dist.irecv(unowned(own), group=group, tag=tag, group_src=peer)
        if self._receiving is None:
            self._receiving = WaitingThread()
        waiting = Waiting([begun(work)])
        self._receiving.put(waiting)
        if not waiting.ends(waits):
            return False
        if dense is not values:
            values.copy_(dense)
        return True

    def _opened(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        return self._group


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements fill its memory: this one, or a copy."""
    is_dense = span_elements(tuple(value.shape), value.stride()) == value.numel()
    if value.device.type == "cpu" and is_dense:
        return value
    return value.to("cpu", copy=True).contiguous()


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    flat = dense.detach().as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8)
