"""The CPU as a device: files are read into the memory that it computes from, so nothing is copied."""

from __future__ import annotations

import time

import torch

from gascompile.core.errors import DeviceError
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.protocols import CopyStream, Event, Instant


class DeviceInRam:
    """What devices have in common whose memory is RAM and whose time is the processor's."""

    torch_device = torch.device("cpu")
    races = None

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> Arena:
        return Arena(size_bytes, early.take(size_bytes) if early is not None else None)

    def pinned(self, size_bytes: int) -> Arena:
        return Arena(size_bytes)

    def clock(self) -> Instant:
        return time.perf_counter()

    def elapsed_s(self, start: Instant, stop: Instant) -> float:
        seconds: float = stop - start
        return seconds

    def peak_bytes(self) -> None:
        return None

    def graphs(self) -> None:
        return None

    def out_of_memory(self, what: str, error: BaseException) -> DeviceError:
        return DeviceError(f"there is no memory for {what}: {error}", cause="device memory")


class CpuDevice(DeviceInRam):
    """RAM and the processor. What has arrived is in place: there are no events to hold on."""

    name = "cpu"
    is_host = True
    paces_links = False
    capacity_bytes = None

    def stream(self, link: str, *, ahead: bool = False) -> CopyStream:  # noqa: ARG002
        raise DeviceError(
            f"the CPU has no stream for the link '{link}': it computes where files go"
        )

    def begin(self) -> None:
        pass

    def mark(self) -> None:
        return None

    def hold(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        pass

    def place(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def close(self) -> None:
        pass
