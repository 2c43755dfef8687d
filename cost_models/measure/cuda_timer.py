"""The stop watch behind ``measure_gpu`` on a real device: pinned memory, streams, and the host's clock.

Times are those of the host between two synchronisations, as a transfer or an op costs them. All memory is
taken when the timer is made and given back when it is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from gascompile.core.machine import IoSettings
from gascompile.core.sizes import GIB, MIB
from gascompile.cost_models.measure.disk import ProbeReader, ReadResult

GPU_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
FEW_GPU_ROWS = (1, 16, 256, 4096)

_COPY_BYTES = 64 * MIB
_WIDE, _NARROW = 8192, 2048
_FEW = 16  # rows of products that are not timed
_ROOMY_BYTES = 3 * GIB
"""With so much free, weights of a product are larger than the caches of any device."""


class CudaTimer:
    """A ``GpuTimer`` of the current CUDA device."""

    def __init__(self, cuda: Any = torch.cuda, *, device: str = "cuda") -> None:
        """Take the memory; ``cuda`` is ``torch.cuda`` or what stands in for it, with ``device`` as its device."""
        self._cuda = cuda
        self._on = device
        free_bytes, self.total_bytes = cuda.mem_get_info()
        self.width = _WIDE if free_bytes > _ROOMY_BYTES else _NARROW
        self.name = str(cuda.get_device_name(cuda.current_device()))
        self._host = [self._pinned(), self._pinned()]
        self._device = [self._empty(_COPY_BYTES), self._empty(_COPY_BYTES)]
        self._streams = [cuda.Stream(), cuda.Stream()]
        self._operands: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _pinned(self) -> torch.Tensor:
        return _pinned(_COPY_BYTES, self._on)

    def _empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._on)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._cuda.synchronize()
        start = time.perf_counter()
        call()
        self._cuda.synchronize()
        return time.perf_counter() - start

    def copy_s(self, size_bytes: int, *, into: bool, out: bool) -> float:
        """Copy from and to pinned memory, each direction on a stream of its own."""

        def copies() -> None:
            if into:
                with self._cuda.stream(self._streams[0]):
                    self._device[0][:size_bytes].copy_(
                        self._host[0][:size_bytes], non_blocking=True
                    )
            if out:
                with self._cuda.stream(self._streams[1]):
                    self._host[1][:size_bytes].copy_(
                        self._device[1][:size_bytes], non_blocking=True
                    )

        return self._seconds(copies)

    def pass_s(self, size_bytes: int) -> float:
        """Copy one half of the device's buffers over the other."""
        source, target = (part[:size_bytes] for part in self._device)
        return self._seconds(lambda: target.copy_(source))

    def product_s(self, dtype: str, rows: int) -> float:
        """Multiply with ``torch.mm`` into memory that is there already."""
        key = (dtype, rows)
        if key not in self._operands:
            # One at a time: several would not fit into a small memory.
            self._operands.clear()
            options = {"dtype": getattr(torch, dtype), "device": self._on}
            self._operands[key] = (
                torch.full((rows, self.width), 0.01, **options),
                torch.full((self.width, self.width), 0.01, **options),
                torch.empty((rows, self.width), **options),
            )
        left, right, out = self._operands[key]
        return self._seconds(lambda: torch.mm(left, right, out=out))

    def calls_s(self, num_calls: int) -> float:
        """Add one to a tensor of one element again and again."""
        one = torch.ones(1, device=self._on)
        add = torch.ops.aten.add.Tensor

        def calls() -> None:
            for _ in range(num_calls):
                add(one, one)

        return self._seconds(calls)

    def library_bytes(self) -> int:
        """Return what torch's allocator holds more during and after products than their operands.

        One workspace is taken at the first product of a thread and stream and never given back; products that add a
        bias take another one each time.
        """
        self._operands.clear()
        if self._on != "cpu":
            torch._C._cuda_clearCublasWorkspaces()
        self._cuda.synchronize()
        before = int(self._cuda.memory_allocated())
        most_bytes = 0
        for dtype in (torch.float32, torch.bfloat16):
            options: Any = {"dtype": dtype, "device": self._on}
            rows, weight = (torch.ones(n, _NARROW, **options) for n in (_FEW, _NARROW))
            bias, out = torch.ones(_NARROW, **options), torch.empty(_FEW, _NARROW, **options)
            self._cuda.reset_peak_memory_stats()
            torch.mm(rows, weight, out=out)
            torch.addmm(bias, rows, weight, out=out)
            self._cuda.synchronize()
            own_bytes = sum(x.nbytes for x in (rows, weight, bias, out))
            counted = int(self._cuda.max_memory_allocated())
            most_bytes = max(most_bytes, counted - before - own_bytes)
            # Each dtype's operands are gone before the next has its own.
            del rows, weight, bias, out
        return most_bytes

    def close(self) -> None:
        """Give all memory back."""
        self._operands.clear()
        self._host.clear()
        self._device.clear()
        self._cuda.synchronize()
        # Not a part of any run: what was measured with must not count against a plan's budget.
        self._cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class StagedReader:
    """Reads a file into one pinned buffer while another is on its way to the device, as the runtime does."""

    def __init__(
        self, read: ProbeReader, size_bytes: int, cuda: Any = torch.cuda, *, device: str = "cuda"
    ) -> None:
        """Take two pinned buffers and one on the device of ``size_bytes`` each."""
        self._read = read
        self._cuda = cuda
        self._slots = [_pinned(size_bytes, device) for _ in range(2)]
        self._target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._stream = cuda.Stream()
        self._turn = 0

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> ReadResult:
        """Read the next part while the one before is copied, and then give its copy to the stream."""
        slot = self._slots[self._turn % 2]
        self._turn += 1
        start = time.perf_counter()
        into = slot.numpy().data[:size_bytes]
        read = self._read(path, offset=offset, size_bytes=size_bytes, into=into, io=io)
        self._stream.synchronize()
        with self._cuda.stream(self._stream):
            self._target[:size_bytes].copy_(slot[:size_bytes], non_blocking=True)
        return _Staged(time.perf_counter() - start, read.path)


class _Staged:
    """A ``ReadResult``."""

    def __init__(self, time_s: float, path: str) -> None:
        self.time_s = time_s
        self.path = path


def _pinned(size_bytes: int, device: str) -> torch.Tensor:
    """Return host memory that ``device`` copies from without the processor; plain where it is the host."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")


def rows_for(effort: str) -> Sequence[int]:
    """Return the rows of the products for the name of an ``Effort``."""
    return GPU_ROWS if effort == "thoroughly" else FEW_GPU_ROWS
