"""CUDA without a GPU, as late as it may be: a stream does nothing before somebody waits for it.

Device memory is memory of the host. Compute runs at once, as ops are ordinary calls; copies stay in their
stream's queue until an event behind them is waited for, and poison stands at their target meanwhile. So what
is not ordered by an event is read before it is there. All waiting of the host is counted, by thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gascompile.runtime.devices.cuda import CudaApi
from gascompile.runtime.memory.arena import POISON
from tests.runtime.devices.fake_graphs import FakeGraph, FakePool

_OTHERS_BYTES = 1 << 20
"""What others hold of the device."""


class FakeStream:
    """A queue of things to do, done up to where somebody waits."""

    def __init__(self, name: str, lock: threading.RLock) -> None:
        self.name = name
        self._lock = lock
        self._queue: list[Callable[[], None]] = []
        self.done = 0
        self.runtime: FakeRuntime

    @property
    def given(self) -> int:
        return len(self._queue)

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)
            if self.name == "compute":
                self.reach(self.given)

    def reach(self, position: int) -> None:
        with self._lock:
            while self.done < position:
                work = self._queue[self.done]
                self._queue[self.done] = _nothing
                work()
                # What it held goes here: whoever waited in another thread finds the memory free, as a GPU's is.
                del work
                self.done += 1

    def wait_event(self, event: FakeEvent) -> None:
        self.runtime.orders.append((self.name, event.stream.name))
        position = event.position
        self.enqueue(lambda: event.stream.reach(position))

    def wait_stream(self, other: FakeStream) -> None:
        position = other.given
        self.enqueue(lambda: other.reach(position))

    def synchronize(self) -> None:
        self.runtime.count("stream")
        self.reach(self.given)


class FakeEvent:
    """A position in a stream."""

    def __init__(self, runtime: FakeRuntime, *, enable_timing: bool) -> None:
        self._runtime = runtime
        self._timed = enable_timing
        self.stream: FakeStream
        self.position = -1
        self.time_s = 0.0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, stream.given
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        self._runtime.count("event")
        self.stream.reach(self.position)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._timed
        assert other._timed
        return (other.time_s - self.time_s) * 1e3


class FakeRuntime:
    """What stands for ``torch.cuda``."""

    def __init__(self, *, total_bytes: int, refuse_pins: bool) -> None:
        self.total_bytes = total_bytes
        self._refuse_pins = refuse_pins
        self._lock = threading.RLock()
        self.compute = self._named("compute")
        self._current = threading.local()
        self.streams: list[FakeStream] = []
        self.orders: list[tuple[str, str]] = []
        """``(who waits, for whom)`` of waits between streams."""
        self.waits: Counter[tuple[str, str]] = Counter()
        """Waits of the host: ``(kind, thread)``."""
        self.allocations: list[int] = []
        self.allocated_bytes = self.peak_bytes = _OTHERS_BYTES
        self.pinned: dict[int, int] = {}
        self.num_pins = 0
        self.capturing = False
        self.captured: list[FakeGraph] = []
        """Graphs that are, in the order of their capture."""
        self.pools: list[FakePool] = []

    def _named(self, name: str) -> FakeStream:
        stream = FakeStream(name, self._lock)
        stream.runtime = self
        return stream

    def count(self, kind: str) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.waits[kind, "main" if main else "other"] += 1

    def main_waits(self) -> int:
        """Return how often the main thread has waited for the device so far."""
        return sum(count for (_, thread), count in self.waits.items() if thread == "main")

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the memory of ``tensor`` until it goes."""
        size_bytes = tensor.nbytes
        if self.allocated_bytes + size_bytes > self.total_bytes:
            raise torch.OutOfMemoryError("the fake device is full")
        self.allocations.append(size_bytes)
        self.took(size_bytes)
        weakref.finalize(tensor.untyped_storage(), self.gave, size_bytes)
        return tensor

    def took(self, size_bytes: int) -> None:
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def gave(self, size_bytes: int) -> None:
        self.allocated_bytes -= size_bytes

    # ------------------------------------------------------------ torch.cuda

    def current_device(self) -> int:
        return 0

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - torch's name
        assert device.type == "cpu"
        self.streams.append(self._named(f"copies {len(self.streams)}"))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self, enable_timing=enable_timing)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self, _device: torch.device | None = None) -> FakeStream:
        found: FakeStream = getattr(self._current, "stream", self.compute)
        return found

    def synchronize(self, _device: torch.device) -> None:
        self.count("device")
        for stream in (self.compute, *self.streams):
            stream.reach(stream.given)

    def memory_allocated(self, _device: torch.device) -> int:
        return self.allocated_bytes

    def memory_reserved(self) -> int:
        return self.allocated_bytes - _OTHERS_BYTES

    def reset_peak_memory_stats(self, _device: torch.device) -> None:
        self.peak_bytes = self.allocated_bytes

    def max_memory_allocated(self, _device: torch.device) -> int:
        return self.peak_bytes

    def mem_get_info(self) -> tuple[int, int]:
        return self.total_bytes - self.allocated_bytes, self.total_bytes

    def cudart(self) -> FakeRuntime:
        return self

    def cudaHostRegister(self, start: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert start % 4096 == 0
        if self._refuse_pins:
            return 2
        self.num_pins += 1
        self.pinned[start] = size_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return 0

    def empty_cache(self) -> None:
        self.count("device")

    def graph_pool_handle(self) -> FakePool:
        self.pools.append(FakePool(self))
        return self.pools[-1]

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        return FakeGraph(self)


class FakeApi(CudaApi):
    """``CudaApi`` on a ``FakeRuntime``."""

    def __init__(self, *, total_bytes: int = 1 << 30, refuse_pins: bool = False) -> None:
        self.runtime: FakeRuntime = FakeRuntime(total_bytes=total_bytes, refuse_pins=refuse_pins)

    def device(self, number: int | None) -> torch.device:
        assert number in (None, 0)
        return torch.device("cpu")

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return self.runtime.allocate(super().empty(size_bytes, device).fill_(POISON))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = source if self.contains_pinned(source) else target
        assert self.contains_pinned(host), "one side of a copy is pinned"
        target.view(torch.uint8).fill_(POISON)
        self.runtime.current_stream().enqueue(lambda: _copy(target, source))

    def contains_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        pinned = self.runtime.pinned.items()
        return any(low <= start and start + tensor.nbytes <= low + size for low, size in pinned)

    def place(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        with _disable_current_modes():
            return self.runtime.allocate(value.clone())

    def keep(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self.runtime.allocate(super().keep(value, device))

    def room(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        with _disable_current_modes():
            return self.runtime.allocate(super().room(value, device))

    def drop_workspaces(self) -> None:
        pass


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    pass


def fake_cuda(**options: Any) -> tuple[FakeApi, FakeRuntime]:
    """Return an API to make a ``CudaDevice`` with, and what it has been asked for."""
    api = FakeApi(**options)
    return api, api.runtime
