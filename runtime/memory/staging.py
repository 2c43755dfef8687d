"""Pinned slots between files and a device: reading threads fill them, copy streams empty them.

Two slots for each thread: it reads into one while the other is on its way. All of it is taken when the
session opens; a slot is used again once the event of its last copy is reached.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gascompile.core.machine import IoSettings
from gascompile.core.sizes import align_up
from gascompile.runtime.debug.races import host_thread
from gascompile.runtime.protocols import CopyStream, Device, Event, Memory
from gascompile.runtime.transfer.read_plan import Landing, Piece


@dataclass(slots=True)
class StagingSlot:
    """Room for one chunk."""

    memory: memoryview
    bytes: torch.Tensor
    event: Event | None = None
    """End of the copy that reads from it."""


class Staging:
    """The slots of a session; its ``delivery`` is what an engine ``Receive``s with."""

    def __init__(self, device: Device, arena: Memory, io: IoSettings) -> None:
        """Take the slots; raises ``DeviceError`` where so much memory cannot be pinned."""
        self._device = device
        self._arena = arena
        slot_bytes = align_up(io.chunk_bytes)
        self.memory = device.pinned(io.staging_bytes)
        self._slots: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()
        for start in range(0, io.staging_bytes, slot_bytes):
            stop = start + slot_bytes
            part = self.memory.memory[start:stop]
            self._slots.put(StagingSlot(part, self.memory.bytes(start, stop)))

    @contextmanager
    def slot(self) -> Iterator[StagingSlot]:
        """Return a free slot; blocks until there is one and its last copy is over."""
        slot = self._slots.get()
        try:
            if slot.event is not None:
                slot.event.wait()
                slot.event = None
            yield slot
        finally:
            self._slots.put(slot)

    def delivery(
        self, landing: Landing, address: int, link: str, after: Event | None
    ) -> StagedReads:
        """Return a delivery to the reservation at ``address`` of the device's arena."""
        return self.delivery_to(self._arena, landing, address, link, after)

    def delivery_to(
        self, memory: Memory, landing: Landing, address: int, link: str, after: Event | None
    ) -> StagedReads:
        """Return a delivery to the reservation at ``address`` of other memory."""
        target = memory.bytes(address, address + landing.shift_bytes + landing.size_bytes)
        return StagedReads(self, landing, target, self._device.stream(link), after)

    def filled(self, slot: StagingSlot, piece: Piece, name: str) -> None:
        """Note that the calling thread has read a chunk into a slot."""
        if self._device.races is not None:
            part = slot.bytes[: piece.needed_bytes]
            what = "a read into a staging slot"
            self._device.races.access(host_thread(), part, writes=True, name=name, what=what)


class StagedReads:
    """A ``Delivery`` by copies out of slots, in whichever order the chunks are read."""

    def __init__(
        self,
        staging: Staging,
        landing: Landing,
        target: torch.Tensor,
        stream: CopyStream,
        after: Event | None,
    ) -> None:
        self._staging = staging
        self._landing = landing
        self._target = target
        self._stream = stream
        self._after = after
        self._booking = stream.book(landing.size_bytes, after=after)
        self._last: Event | None = None
        self._lock = threading.Lock()

    @contextmanager
    def room(self, piece: Piece) -> Iterator[memoryview]:
        with self._staging.slot() as slot:
            yield slot.memory[: piece.size_bytes]
            self._staging.filled(slot, piece, self._landing.name)
            slot.event = self._copy(piece, slot.bytes)

    def end(self) -> Event | None:
        """Return the event of the copy that was queued last, which is the last to end."""
        return self._last

    def give_up(self) -> None:
        if self._booking is not None:
            self._booking.cancel()

    def _copy(self, piece: Piece, source: torch.Tensor) -> Event | None:
        """Queue the copy of what a chunk holds of the tensor: pages around it are left out."""
        landing = self._landing
        low = max(piece.position, landing.shift_bytes)
        high = piece.position + piece.needed_bytes
        high = min(high, landing.shift_bytes + landing.size_bytes)
        if high <= low:
            return None
        part = source[low - piece.position : high - piece.position]
        with self._lock:
            self._last = self._stream.copy(
                self._target[low:high],
                part,
                name=landing.name,
                after=self._after,
                booking=self._booking,
            )
            return self._last
