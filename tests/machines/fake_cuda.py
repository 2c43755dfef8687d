"""Stands in for ``torch.cuda`` on the host: memory that others may hold, streams that do at once what they get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(eq=False)
class FakeStream:
    num_synchronized: int = 0

    def synchronize(self) -> None:
        self.num_synchronized += 1


@dataclass
class FakeRuntime:
    """The part of the CUDA runtime that pins memory."""

    limit_bytes: int | None = None
    """More than that in one piece is refused, as a driver that heeds ``ulimit -l`` does."""
    pinned: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, start: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if self.limit_bytes is not None and size_bytes > self.limit_bytes:
            return 2
        self.pinned[start] = size_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return 0


@dataclass
class FakeCuda:
    """A GPU of 8 GiB, of which 7 are free."""

    names: tuple[str, ...] = ("Some GPU",)
    free_bytes: int = 7 * GIB
    total_bytes: int = 8 * GIB
    own_bytes: int = 0
    allocated: list[int] = field(default_factory=lambda: [0])
    """What ``memory_allocated`` says: each but the last once."""
    peaks: list[int] = field(default_factory=lambda: [0])
    """What ``max_memory_allocated`` says, likewise."""
    runtime: FakeRuntime = field(default_factory=FakeRuntime)
    streams: list[FakeStream] = field(default_factory=list)
    used_streams: list[FakeStream] = field(default_factory=list)
    num_synchronized: int = 0
    num_emptied: int = 0
    error: str = ""

    def is_available(self) -> bool:
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, index: int = 0) -> str:
        return self.names[index]

    def mem_get_info(self) -> tuple[int, int]:
        if self.error:
            raise RuntimeError(self.error)
        return self.free_bytes, self.total_bytes

    def memory_reserved(self) -> int:
        return self.own_bytes

    def memory_allocated(self, device: object = None) -> int:
        return self.allocated.pop(0) if len(self.allocated) > 1 else self.allocated[0]

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Peaks are as they are given."""

    def max_memory_allocated(self, device: object = None) -> int:
        return self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]

    def synchronize(self, device: object = None) -> None:
        self.num_synchronized += 1

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def cudart(self) -> FakeRuntime:
        return self.runtime

    def Stream(self) -> FakeStream:  # noqa: N802 - the module's name
        self.streams.append(FakeStream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.used_streams.append(stream)
        yield
