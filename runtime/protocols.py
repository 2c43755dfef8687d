"""The seams of the runtime: what an engine, a ticket, a device and a low-level read must do.

A device is a memory with copy streams beside it. The CPU's is the memory that files are read into, so it
needs no streams; everything above the devices is one code for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from gascompile.core.errors import DeviceError
from gascompile.runtime.debug.races import Races
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.transfer.read_plan import Landing, Piece


class Reader(Protocol):
    """A positional read; raises ``OSError`` and may deliver fewer bytes than there is room for."""

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int: ...


# ---------------------------------------------------------------- devices


class Event(Protocol):
    """A point in what a stream has been given to do."""

    @property
    def reached(self) -> bool:
        """Whether all that stands before it is done."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is reached."""
        ...


class Booking(Protocol):
    """The place of a transfer in the time table of its link, taken when it was asked for."""

    def cancel(self) -> None:
        """Leave what no copy was given for to others: no more copies come."""
        ...


class CopyStream(Protocol):
    """One direction of one link: copies are done one after the other, beside compute."""

    def book(self, size_bytes: int, *, after: Event | None = None) -> Booking | None:
        """Note that a transfer has been asked for whose copies follow once their bytes are read.

        An emulated link is at it from now on, before whatever is asked for later. A real one needs no note: its
        reads are part of the transfer.

        Args:
            size_bytes: of all copies together.
            after: the transfer starts no earlier.
        """
        ...

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        name: str,
        after: Event | None = None,
        booking: Booking | None = None,
    ) -> Event:
        """Queue a copy of bytes and return the event of its end; returns at once.

        Both tensors must stay what they are until then. Threads may call at the same time.

        Args:
            target: contiguous bytes.
            source: as many bytes.
            name: of the tensor, for messages.
            after: the copy starts no earlier.
            booking: of the transfer that the copy is a part of; ``None`` for one that is a transfer of its own.
        """
        ...


class Memory(Protocol):
    """Memory of an exact size, taken once."""

    @property
    def size_bytes(self) -> int: ...

    def view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at ``offset``; it is never copied."""
        ...

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from offset ``start`` to ``stop`` as a tensor over them."""
        ...

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in this memory."""
        ...

    def fill(self, start: int, stop: int, value: int) -> None:
        """Set the bytes from offset ``start`` to ``stop``, as a part of compute."""
        ...

    def close(self) -> None:
        """Give the memory back; idempotent."""
        ...


class HostMemory(Memory, Protocol):
    """Memory that files are read into; copies between it and a device are asynchronous."""

    @property
    def memory(self) -> memoryview: ...


class Sharer(Protocol):
    """Who keeps memory of the device from run to run, and can do without."""

    @property
    def held_bytes(self) -> int:
        """What it keeps."""
        ...

    def give_back(self) -> None:
        """Keep nothing, until the next runs."""
        ...


Instant = Any
"""What ``Device.clock`` returns: a time on the host or an event on the device."""


class Graph(Protocol):
    """What compute was given once, to be given to it again in one call."""

    def replay(self) -> None:
        """Give it to compute; it reads and writes the addresses of when it was captured."""
        ...


class Graphs(Protocol):
    """Graphs of one sequence of work, which share memory: they are replayed in the order of their capture.

    Memory that tensors of one graph had is taken again by graphs that are captured once those tensors are
    gone, as it is where ops run one by one.
    """

    @property
    def most_bytes(self) -> int:
        """The most memory that their tensors took at once: they hold it as long as they are."""
        ...

    def begin(self) -> None:
        """Block until the device is idle and give memory back that nobody uses: captures follow."""
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """Make a graph of what the calling thread gives to compute in the context; none of it is done yet.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        ...

    def settle(self) -> None:
        """After a capture, once nothing is referenced that only its beginning needed: count what it keeps."""
        ...

    def room(self, value: torch.Tensor) -> torch.Tensor:
        """Return memory of the device for values laid out as ``value``."""
        ...

    def load(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Let compute copy ``value``, of the host or the device, to ``target``."""
        ...

    def close(self) -> None:
        """Give the graphs and their memory back; blocks until the device is idle. Idempotent."""
        ...


class Device(Protocol):
    """What computes, its memory, and the streams that copy to and from it."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors lie that ops take and return."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether files are read straight into the arena: there are no streams and no events then."""
        ...

    @property
    def paces_links(self) -> bool:
        """Whether it keeps the links of its machine to their speeds, those between places of the host, too."""
        ...

    @property
    def capacity_bytes(self) -> int | None:
        """What a run may allocate there where the memory itself does not refuse; else ``None``."""
        ...

    @property
    def races(self) -> Races | None:
        """Who watches the accesses to the arena; ``None`` outside of paranoid runs."""
        ...

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> Memory:
        """Take the device's memory for weights; raises ``DeviceError``."""
        ...

    def pinned(self, size_bytes: int) -> HostMemory:
        """Take page-aligned host memory that the device copies from; raises ``DeviceError``."""
        ...

    def stream(self, link: str, *, ahead: bool = False) -> CopyStream:
        """Return a stream of a link, ``cpu->gpu`` for instance; made once.

        Args:
            link: its name in the machine.
            ahead: the one for a few bytes that compute is held up by: they go beside whatever the link is at,
                not behind all that it has been asked for.
        """
        ...

    def begin(self) -> None:
        """Start a run of the calling thread: what it computes comes after what was computed before."""
        ...

    def mark(self) -> Event | None:
        """Return the event of all that compute has been given so far."""
        ...

    def hold(self, event: Event) -> None:
        """Let all that compute is given from now on come after ``event``."""
        ...

    def clock(self) -> Instant:
        """Return the instant at which compute gets to this point."""
        ...

    def elapsed_s(self, start: Instant, stop: Instant) -> float:
        """Return the seconds between two instants; for those of a device, after ``synchronize``."""
        ...

    def synchronize(self) -> None:
        """Block until compute and every stream have done all they were given."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the most that was allocated since ``begin``, that of graphs included; ``None`` where nobody counts."""
        ...

    def place(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` on the device: itself where it is there."""
        ...

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of ``value`` in the device's memory, beside the arena; itself on the host."""
        ...

    def graphs(self) -> Graphs | None:
        """Return an empty sequence of graphs; ``None`` where the device has none."""
        ...

    def out_of_memory(self, what: str, error: BaseException) -> DeviceError:
        """Return what to raise where torch could not allocate ``what``."""
        ...

    def close(self) -> None:
        """Stop the streams; idempotent."""
        ...


# ---------------------------------------------------------------- engines


class Ticket(Protocol):
    """A transfer under way."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns or raises without blocking."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the transfer ended without all its bytes."""
        ...

    @property
    def event(self) -> Event | None:
        """Once done: what compute must hold on before it reads the bytes; ``None`` if they are in place."""
        ...

    def wait(self) -> None:
        """Block until all bytes are in place, or on their way behind ``event``.

        Raises:
            StorageError: they cannot be had.
        """
        ...


class Delivery(Protocol):
    """What becomes of the chunks of one request."""

    def room(self, piece: Piece) -> AbstractContextManager[memoryview]:
        """Return memory for a chunk, which is delivered when the context ends without an error.

        May block until there is some.
        """
        ...

    def end(self) -> Event | None:
        """All chunks were delivered: return what compute has to hold on."""
        ...

    def give_up(self) -> None:
        """No more chunks come, though some are missing."""
        ...


Receive = Callable[[Landing, int, str, Event | None], Delivery]
"""Returns the delivery of a tensor to an address over a link, whose reservation is free after an event."""


class TransferEngine(Protocol):
    """Moves tensors into a fixed memory, by priority, without blocking the caller."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path really taken so far, per link."""
        ...

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | Receive | None = None,
        on_done: Callable[[], None] | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Queue a tensor for the reservation at ``address``; the smallest ``key`` is served first.

        Args:
            memory: where it goes if not into the engine's own memory, or what receives it there.
            on_done: called by a thread of the engine before the ticket is done.
            after: whoever used the reservation before is done with it then.
        """
        ...

    def drain(self) -> None:
        """Cancel what is queued and block until nothing more is given to memory or streams."""
        ...

    def close(self) -> None:
        """Drain and stop; idempotent."""
        ...


def read_at(descriptor: int, into: memoryview, offset: int, /) -> int:
    """Read with one ``preadv``, which releases the GIL while the kernel copies."""
    return os.preadv(descriptor, [into], offset)
