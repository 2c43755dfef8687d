"""Moves between a device's memory and slots outside of it: in pinned memory over its streams, in files through staging.

A copy that nobody has waited for keeps its tensor's memory from being freed. Who waits for a ticket, and then lets
compute hold on its event, may free it: what compute is given afterwards comes after the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from gascompile.core.huge_pages import map_anonymous
from gascompile.core.parts import Span
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.runtime.memory.host_slots import HOST_BYTES, HostSlots
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.source_slots import Pieces
from gascompile.runtime.memory.staged_moves import StagedMove, StagedMoves
from gascompile.runtime.memory.storages import bytes_of
from gascompile.runtime.protocols import Device, Event, Reader, read_at
from gascompile.runtime.transfer.page_ring import LaneMoves


class HostMove:
    """A copy from or to pinned memory; a ``Ticket`` that is done at once, as its event tells when it ends."""

    done = True
    failed = False

    def __init__(self, event: Event, content: torch.Tensor | None) -> None:
        self.event: Event | None = event
        self._content: torch.Tensor | None = content

    @property
    def begun_s(self) -> float:
        """When it began, by ``time.perf_counter``, where the device knows."""
        return float(getattr(self.event, "begun_s", 0.0))

    @property
    def done_s(self) -> float:
        """When it ended."""
        return float(getattr(self.event, "end_s", 0.0))

    @property
    def is_over(self) -> bool:
        """Whether the memory may go: somebody has waited, or the copy has ended."""
        return self._content is None or self.event is None or self.event.reached

    def wait(self) -> None:
        self._content = None


class DeviceMoves:
    """What all plans of one device share, the device included. For one submitting thread."""

    def __init__(self, device: Device, *, reader: Reader = read_at) -> None:
        """Take the staging memory, and let the device know what others hold of its own.

        Raises:
            DeviceError: memory cannot be had.
        """
        self.device = device
        self._mark = device.arena(0)
        self.buffers = memoryview(map_anonymous(2 * SPILL_BUFFER_BYTES))
        """For what goes between the host and files while no device is at work."""
        self.staged = StagedMoves(device, reader=reader)
        self.host = HostSlots(device)
        self._flying: deque[HostMove | StagedMove] = deque()

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is taken."""
        return HOST_BYTES + self.host.size_bytes

    def place(self, link: str, *, writes: bool) -> str:
        """Return the tier outside that a link leads to, or comes from."""
        source, _, target = link.partition("->")
        return target if writes else source

    def submit(
        self,
        name: str,
        storage: torch.UntypedStorage,
        link: str,
        after: Event | None,
        pieces: Pieces,
        *,
        writes: bool,
        parts: Sequence[Span] | None = None,
    ) -> HostMove | StagedMove | LaneMoves:
        """Start moving a storage of the device over a link.

        Args:
            name: of the tensor, whose slot on the host is meant where the link leads there.
            storage: must not change before the ticket is done and its event reached.
            link: ``gpu->cpu`` for instance.
            after: the transfer starts no earlier.
            pieces: open file, offset and bytes of each range of it, where the link leads to files.
            writes: out of the device.
            parts: pages of it that suffice, as where they go has the rest.
        """
        while self._flying and self._flying[0].is_over:
            self._flying.popleft()
        content = bytes_of(storage)
        spans = [(begin, min(end, content.nbytes)) for begin, end in parts or ()]
        move: HostMove | StagedMove
        if spans and self.place(link, writes=writes) != HOST:
            ((file, offset, _),) = pieces
            several = [
                self.staged.submit(
                    name,
                    content[begin:end],
                    link,
                    after,
                    ((file, offset + begin, end - begin),),
                    writes=True,
                )
                for begin, end in spans
            ]
            self._flying.extend(several)
            return LaneMoves(several)
        if self.place(link, writes=writes) == HOST:
            outside = self.host.bytes(name, content.nbytes)
            if writes:
                self.host.claim(name)
            target, source = (outside, content) if writes else (content, outside)
            stream = self.device.stream(link)
            whole = [(0, content.nbytes)]
            total_bytes = sum(end - begin for begin, end in spans or whole)
            # One transfer of the link, whatever it consists of.
            booking = stream.book(total_bytes, after=after) if spans else None
            for begin, end in spans or whole:
                event = stream.copy(
                    target[begin:end], source[begin:end], name=name, after=after, booking=booking
                )
            move = HostMove(event, content)
        else:
            move = self.staged.submit(name, content, link, after, pieces, writes=writes)
        self._flying.append(move)
        return move

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        self.staged.drain()
        self.device.synchronize()
        self._flying.clear()

    def close(self) -> None:
        """Finish what is under way, give the host's memory back and close the device; idempotent."""
        self.staged.close()
        self.device.synchronize()
        self._flying.clear()
        self.host.close()
        self.device.close()
