"""Any device, with every access to its arena checked: for paranoid runs.

Events carry the clock of their stream, and every copy, mark, hold and wait is passed on to ``Races``. What
is checked is the order that the events promise, not the one that came about: so the emulated accelerator,
where compute blocks the host, finds the waits that a real device would miss.
"""

from __future__ import annotations

import torch

from gascompile.core.errors import DeviceError
from gascompile.runtime.all_of import events_of, joined
from gascompile.runtime.debug.races import COMPUTE, Clock, Races, host_thread
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.protocols import (
    Booking,
    CopyStream,
    Device,
    Event,
    HostMemory,
    Instant,
    Memory,
)


class WatchedEvent:
    """An event and what is over once it is reached."""

    def __init__(self, inner: Event | None, clock: Clock, races: Races) -> None:
        self.inner = inner
        self.clock = clock
        self._races = races

    @property
    def reached(self) -> bool:
        return self.inner is None or self.inner.reached

    def wait(self) -> None:
        if self.inner is not None:
            self.inner.wait()
        self._races.join(host_thread(), self.clock)


class WatchedStream:
    """A copy stream whose copies are checked when they are given to it."""

    def __init__(self, link: str, inner: CopyStream, races: Races) -> None:
        self._link = link
        self._inner = inner
        self._races = races

    def book(self, size_bytes: int, *, after: Event | None = None) -> Booking | None:
        # What orders the copies is what they themselves wait for.
        return self._inner.book(size_bytes, after=_inner(after))

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        name: str,
        after: Event | None = None,
        booking: Booking | None = None,
    ) -> Event:
        races, link = self._races, self._link
        for event in events_of(after):
            if isinstance(event, WatchedEvent):
                races.join(link, event.clock)
        after = _inner(after)
        what = f"a copy over {link}"
        races.access(link, source, writes=False, name=name, what=what)
        races.access(link, target, writes=True, name=name, what=what)
        clock = races.mark(link)
        inner = self._inner.copy(target, source, name=name, after=after, booking=booking)
        return WatchedEvent(inner, clock, races)


def _inner(after: Event | None) -> Event | None:
    """Return what a watched stream lets the one inside it wait for."""
    return joined(e.inner if isinstance(e, WatchedEvent) else e for e in events_of(after))


class WatchedDevice:
    """``inner``, watched."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self._races = Races()
        self._streams: dict[str, WatchedStream] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def torch_device(self) -> torch.device:
        return self._inner.torch_device

    @property
    def is_host(self) -> bool:
        return self._inner.is_host

    @property
    def paces_links(self) -> bool:
        return self._inner.paces_links

    @property
    def capacity_bytes(self) -> int | None:
        return self._inner.capacity_bytes

    @property
    def races(self) -> Races:
        return self._races

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> Memory:
        memory = self._inner.arena(size_bytes, early)
        if size_bytes:
            self._races.place("arena", memory.bytes(0, size_bytes))
        return memory

    def pinned(self, size_bytes: int) -> HostMemory:
        return self._inner.pinned(size_bytes)

    def stream(self, link: str, *, ahead: bool = False) -> WatchedStream:
        name = f"{link} ahead" if ahead else link
        if name not in self._streams:
            inner = self._inner.stream(link, ahead=ahead)
            self._streams[name] = WatchedStream(name, inner, self._races)
        return self._streams[name]

    def begin(self) -> None:
        self._inner.begin()

    def mark(self) -> WatchedEvent:
        return WatchedEvent(self._inner.mark(), self._races.mark(COMPUTE), self._races)

    def hold(self, event: Event) -> None:
        if isinstance(event, WatchedEvent):
            self._races.join(COMPUTE, event.clock)
            if event.inner is not None:
                self._inner.hold(event.inner)
        else:
            self._inner.hold(event)

    def clock(self) -> Instant:
        return self._inner.clock()

    def elapsed_s(self, start: Instant, stop: Instant) -> float:
        return self._inner.elapsed_s(start, stop)

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._races.join_all(host_thread())

    def peak_bytes(self) -> int | None:
        return self._inner.peak_bytes()

    def place(self, value: torch.Tensor) -> torch.Tensor:
        return self._inner.place(value)

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        return self._inner.keep(value)

    def graphs(self) -> None:
        # A replay says nothing of its accesses.
        return None

    def out_of_memory(self, what: str, error: BaseException) -> DeviceError:
        return self._inner.out_of_memory(what, error)

    def close(self) -> None:
        self._inner.close()
