"""Weights whose home is the host's memory: read once into pinned memory, copied to the device ever after."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from gascompile.core.sizes import reserve_bytes
from gascompile.runtime.protocols import (
    CopyStream,
    Device,
    Event,
    HostMemory,
    Memory,
    Ticket,
    TransferEngine,
)
from gascompile.runtime.transfer.read_plan import Landing


class HostCopy:
    """A copy to the device that starts as soon as its bytes are on the host; a ``Ticket``."""

    def __init__(self, load: Ticket, start: Callable[[], Event]) -> None:
        self._load = load
        self._start = start
        self.event: Event | None = None

    @property
    def done(self) -> bool:
        return self.event is not None or self._load.failed

    @property
    def failed(self) -> bool:
        return self._load.failed

    def wait(self) -> None:
        # Its end comes after the copies that waited for it were started.
        self._load.wait()

    def go(self) -> None:
        """Give the copy to its stream; for the one thread that has it."""
        self.event = self._start()


class Forgetful(Protocol):
    """What holds copies for the run at hand alone."""

    def forget(self) -> None:
        """Drop them; nothing moves any more."""
        ...


class HostWeights:
    """Pinned memory of the size that the plans' homes take, and what has been read into it."""

    def __init__(
        self, device: Device, engine: TransferEngine, link: str, pinned: list[Memory]
    ) -> None:
        """Hold nothing yet; ``pinned`` is where memory is noted that has to be closed with the session."""
        self._device = device
        self._engine = engine
        self._link = link
        self._pinned = pinned
        self._bytes: dict[str, torch.Tensor] = {}
        self._loads: dict[str, tuple[Landing, HostMemory, int, int]] = {}
        self._tickets: dict[str, Ticket] = {}
        self._here: set[str] = set()
        self._waiting: dict[str, queue.SimpleQueue[HostCopy]] = {}
        self.half_ways: list[Forgetful] = []
        """What else of plans lies in pinned memory, and only for a while."""

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._bytes

    def add(self, landings: Mapping[str, Landing], first_use: Mapping[str, int]) -> None:
        """Take memory for the tensors that are not here yet and start to read them, the first used first.

        Raises:
            DeviceError: so much memory cannot be pinned.
        """
        missing = {
            name: landing
            for name, landing in landings.items()
            if name not in self._bytes and landing.size_bytes
        }
        if not missing:
            return
        sizes = (reserve_bytes(landing.size_bytes) for landing in missing.values())
        block = self._device.pinned(sum(sizes))
        self._pinned.append(block)
        address = 0
        for name in sorted(missing, key=lambda name: first_use.get(name, 0)):
            landing = missing[name]
            start = address + landing.shift_bytes
            self._waiting[name] = queue.SimpleQueue()
            self._loads[name] = (landing, block, address, first_use.get(name, 0))
            # Last: an interrupt leaves one that is here whole or not at all.
            self._bytes[name] = block.bytes(start, start + landing.size_bytes)
            address += reserve_bytes(landing.size_bytes)
        self.start()

    def start(self) -> None:
        """Ask for every tensor that has not arrived and is not on its way."""
        for name, (landing, block, address, key) in self._loads.items():
            ticket = self._tickets.get(name)
            if name not in self._here and (ticket is None or ticket.failed):
                self._tickets[name] = self._engine.submit(
                    landing,
                    address,
                    key=key,
                    link=self._link,
                    memory=block.memory,
                    on_done=partial(self._arrived, name),
                )

    def submit(
        self, tensor: str, target: torch.Tensor, stream: CopyStream, after: Event | None
    ) -> Ticket:
        """Copy a tensor to the device: at once where it is here, else when it comes."""
        source = self._bytes[tensor]
        if tensor not in self._tickets:
            self.start()
        copy = HostCopy(
            self._tickets[tensor],
            lambda: stream.copy(target, source, name=tensor, after=after),
        )
        if tensor in self._here:
            copy.go()
        else:
            self._waiting[tensor].put(copy)
            if tensor in self._here:
                # It came in between: whoever takes a copy from the queue starts it.
                self._start_waiting(tensor)
        return copy

    def whole(self, tensor: str) -> tuple[Ticket, torch.Tensor]:
        """Return the bytes of a tensor, and the ticket that says when they are there."""
        return self._tickets[tensor], self._bytes[tensor]

    def wait_for(self, tensor: str) -> None:
        """Block until a tensor is here; raises ``StorageError`` where it cannot be read."""
        self._tickets[tensor].wait()

    def place(self, tensor: str) -> tuple[HostMemory, int]:
        """Return the memory that a tensor lies in, and the offset of its first byte."""
        landing, block, address, _ = self._loads[tensor]
        return block, address + landing.shift_bytes

    def forget(self) -> None:
        """Drop the copies of a run that has ended before its tensors had come."""
        for waiting in self._waiting.values():
            while next_copy(waiting) is not None:
                pass
        for half_way in self.half_ways:
            half_way.forget()

    def _arrived(self, tensor: str) -> None:
        self._here.add(tensor)
        self._start_waiting(tensor)

    def _start_waiting(self, tensor: str) -> None:
        while (copy := next_copy(self._waiting[tensor])) is not None:
            copy.go()


def next_copy(waiting: queue.SimpleQueue[HostCopy]) -> HostCopy | None:
    """Take a copy that waits, if there is any; it is the taker's to start."""
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None
