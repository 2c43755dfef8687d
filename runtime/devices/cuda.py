"""A CUDA device: an arena in its memory, a stream per link, events in place of waiting.

The arena is one allocation of the session, so its tensors need no ``record_stream``: that call keeps the
allocator from handing freed memory to another stream too early, and nothing of the arena is freed before
every stream has been waited for. What ops allocate is used by the compute stream alone, except by copies
that compute holds on before it lets go of the tensor.

Host memory is mapped at its exact size and then registered. Torch's own pinned allocator would round it
up to a power of two.
"""

from __future__ import annotations

import resource
import threading
from typing import Any

import torch

from gascompile.core.errors import DeviceError
from gascompile.core.sizes import format_size
from gascompile.runtime.all_of import events_of
from gascompile.runtime.devices.cuda_graphs import CudaGraphs, Pools
from gascompile.runtime.devices.probe import (
    DEVICE_MEMORY,
    PINNED_MEMORY,
    device_memory,
    require_memory,
)
from gascompile.runtime.kernels import attention
from gascompile.runtime.kernels.packed_triton import install as install_packed_kernels
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.protocols import Booking, Event, Instant

_SHORTEST_STALL_S = 20e-6
"""Two events of the compute stream lie so far apart when nothing is between them, at most."""


class CudaApi:
    """All that this module asks of torch and CUDA; what stands in for it needs no GPU."""

    runtime: Any = torch.cuda
    """Streams, events, counts of memory, ``cudart``."""

    def device(self, number: int | None) -> torch.device:
        return torch.device("cuda", self.runtime.current_device() if number is None else number)

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream; the host side of it is pinned."""
        target.copy_(source, non_blocking=True)

    def place(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an input on the device. Pinned ones are waited for: their owner may write to them next."""
        return value.to(device, non_blocking=not value.is_pinned())

    def keep(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy that is there when this returns, for any stream."""
        return value.contiguous().to(device, copy=True)

    def room(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return memory for a value laid out as ``place`` lays it out."""
        return torch.empty_like(value, device=device)

    def load(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Queue a copy to ``target``; pinned values are waited for, as in ``place``."""
        target.copy_(value, non_blocking=not (value.is_cpu and value.is_pinned()))

    def drop_workspaces(self) -> None:
        """Forget the memory that products work in, one per stream; the next product on a stream takes some."""
        torch._C._cuda_clearCublasWorkspaces()


class CudaMemory:
    """The arena: bytes of the device, with views into them."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.size_bytes: int = memory.nbytes
        self._bytes: torch.Tensor | None = memory

    def view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at ``offset``.

        Raises:
            ValueError: the tensor would pass the end of the arena.
        """
        torch_dtype: torch.dtype = getattr(torch, dtype)
        size_bytes = torch.Size(shape).numel() * torch_dtype.itemsize
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"{size_bytes} bytes at address {offset} pass the end of the arena of {self.size_bytes} bytes"
            )
        return self.bytes(offset, offset + size_bytes).view(torch_dtype).view(shape)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        assert self._bytes is not None, "an arena is not used after it was closed"
        return self._bytes[start:stop]

    def contains(self, tensor: torch.Tensor) -> bool:
        assert self._bytes is not None, "an arena is not used after it was closed"
        own = self._bytes.untyped_storage().data_ptr()
        return self.size_bytes > 0 and tensor.untyped_storage().data_ptr() == own

    def fill(self, start: int, stop: int, value: int) -> None:
        self.bytes(start, stop).fill_(value)

    def close(self) -> None:
        self._bytes = None


class PinnedMemory(Arena):
    """Anonymous host memory that the driver copies from and to without the processor."""

    def __init__(self, size_bytes: int, cuda: Any) -> None:
        """Take and register it; raises ``DeviceError`` where the driver or a limit refuses."""
        super().__init__(size_bytes)
        self._runtime = cuda.cudart()
        # The registration ends before the mapping does: it is undone in ``close``.
        code = int(self._runtime.cudaHostRegister(self._start, size_bytes, 0)) if size_bytes else 0
        self._registered = size_bytes > 0 and not code
        if code:
            super().close()
            raise DeviceError(_pin_refusal(size_bytes, code), cause=PINNED_MEMORY)

    def close(self) -> None:
        if self._registered:
            self._registered = False
            self._runtime.cudaHostUnregister(self._start)
        super().close()


class CudaEvent:
    """An event of a stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """Let what ``stream`` is given from now on come after the event."""
        stream.wait_event(self._event)


class CudaStream:
    """The copy stream of one link."""

    def __init__(self, api: CudaApi, device: torch.device) -> None:
        self._api = api
        self._cuda = api.runtime
        self._stream = self._cuda.Stream(device=device)
        # Reading threads share it: what a copy waits for, the copy and its event belong together.
        self._lock = threading.Lock()

    def book(self, size_bytes: int, *, after: Event | None = None) -> None:  # noqa: ARG002
        return None

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        name: str,  # noqa: ARG002 - part of the protocol
        after: Event | None = None,
        booking: Booking | None = None,  # noqa: ARG002 - the link has its own time
    ) -> CudaEvent:
        with self._lock, self._cuda.stream(self._stream):
            for event in events_of(after):
                assert isinstance(event, CudaEvent), "an event of this device"
                event.hold_back(self._stream)
            self._api.copy(target, source)
            end = self._cuda.Event()
            end.record(self._stream)
            return CudaEvent(end)

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """The current CUDA device, or the one of an index."""

    name = "cuda"
    is_host = False
    paces_links = False
    races = None
    capacity_bytes = None

    def __init__(self, index: int | None = None, *, api: CudaApi | None = None) -> None:
        """Use a device; ``api`` is what stands in for CUDA where there is no GPU."""
        install_packed_kernels()
        attention.install()
        self._api = api or CudaApi()
        self._cuda = self._api.runtime
        self.torch_device = self._api.device(index)
        self._streams: dict[tuple[str, bool], CudaStream] = {}
        self._lock = threading.Lock()
        self._compute: Any = None
        self._before_bytes = 0
        self._pools = Pools(self._cuda, self.torch_device)

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> CudaMemory:
        """Take the arena; raises ``DeviceError`` that says who holds the memory that is missing."""
        if early is not None:
            early.discard()
        self._before_bytes = int(self._cuda.memory_allocated(self.torch_device))
        try:
            memory = self._api.empty(size_bytes, self.torch_device)
        except torch.OutOfMemoryError as error:
            memory_of_device = device_memory(cuda=self._cuda)
            require_memory(memory_of_device, size_bytes, device=str(self.torch_device))
            raise self.out_of_memory(f"an arena of {format_size(size_bytes)}", error) from error
        # What had the memory before, on whichever stream, is done with it.
        self._cuda.synchronize(self.torch_device)
        return CudaMemory(memory)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        return PinnedMemory(size_bytes, self._cuda)

    def stream(self, link: str, *, ahead: bool = False) -> CudaStream:
        with self._lock:
            if (link, ahead) not in self._streams:
                self._streams[link, ahead] = CudaStream(self._api, self.torch_device)
            return self._streams[link, ahead]

    def begin(self) -> None:
        current = self._cuda.current_stream(self.torch_device)
        if self._compute is not None and self._compute != current:
            current.wait_stream(self._compute)
        self._compute = current
        self._pools.begin()

    def mark(self) -> CudaEvent:
        event = self._cuda.Event()
        event.record(self._current())
        return CudaEvent(event)

    def hold(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of this device"
        event.hold_back(self._current())

    def clock(self) -> Instant:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._current())
        return event

    def elapsed_s(self, start: Instant, stop: Instant) -> float:
        seconds = float(start.elapsed_time(stop)) / 1e3
        return seconds if seconds > _SHORTEST_STALL_S else 0.0

    def synchronize(self) -> None:
        self._current().synchronize()
        for stream in list(self._streams.values()):
            stream.synchronize()

    def peak_bytes(self) -> int:
        """Return ``max_memory_allocated`` since ``begin``, less what others held when the session opened.

        Memory that graphs write to counts whether or not torch counts it.
        """
        return max(self._pools.peak_bytes() - self._before_bytes, 0)

    def place(self, value: torch.Tensor) -> torch.Tensor:
        return self._api.place(value, self.torch_device)

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        return self._api.keep(value, self.torch_device)

    def graphs(self) -> CudaGraphs:
        return CudaGraphs(self._api, self.torch_device, self._pools)

    def out_of_memory(self, what: str, error: BaseException) -> DeviceError:
        """Return what to raise where torch could not allocate ``what``."""
        memory = device_memory(cuda=self._cuda)
        return DeviceError(
            f"{self.torch_device} has no room for {what}: of {format_size(memory.total_bytes)} torch holds "
            f"{format_size(memory.own_bytes)} in this process, other processes, contexts and libraries "
            f"{format_size(memory.others_bytes)}, {format_size(memory.free_bytes)} are free ({error}). Stop what "
            "nvidia-smi lists, or pass a smaller budget",
            cause=DEVICE_MEMORY,
        )

    def close(self) -> None:
        self.synchronize()
        self._pools.close()
        self._streams.clear()

    def _current(self) -> Any:
        if self._compute is None:
            self._compute = self._cuda.current_stream(self.torch_device)
        return self._compute


def _pin_refusal(size_bytes: int, code: int) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else format_size(soft)
    return (
        f"the driver refused to pin {format_size(size_bytes)} of host memory (CUDA error {code}); this process "
        f"may lock {limit} (ulimit -l), and pinned memory is never swapped. Raise the limit (docker run "
        "--ulimit memlock=-1), or pass a smaller cpu budget, so that more weights stay on NVMe"
    )
