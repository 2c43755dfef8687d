"""Half way: pinned memory in which the weights of one plan wait between a drive and the device.

Files are read there as soon as the plan has room, and pushed on from there as often as ops need them: a push is given
to its stream when its bytes have come. What comes after it in the same place is read once all pushes from there are
over. A device that keeps its links to a machine's speeds gets the reads through its staging slots, so that they take
as long as on the first hop's link.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Fetch, fetched_to
from gascompile.runtime.all_of import joined
from gascompile.runtime.debug.races import Races, host_thread
from gascompile.runtime.debug.watched import WatchedEvent
from gascompile.runtime.memory.arena import POISON
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.protocols import CopyStream, Event, HostMemory, Receive, Ticket
from gascompile.runtime.transfer.host_weights import HostCopy, next_copy
from gascompile.runtime.transfer.read_plan import InPlace, Landing, Piece

if TYPE_CHECKING:
    from gascompile.runtime.run.session import Session


@dataclass(slots=True)
class _Waiting:
    """A weight half the way, or on its way there."""

    landing: Landing
    address: int
    key: int
    link: str
    source: torch.Tensor
    ticket: Ticket | None = None
    """Of its read; ``None`` while it is not asked for."""
    arrived: bool = False
    is_counted: bool = False
    """Its bytes count as moved."""
    queued: queue.SimpleQueue[HostCopy] = field(default_factory=queue.SimpleQueue)
    """Pushes that wait for its bytes."""
    pushes: list[HostCopy] = field(default_factory=list)
    reads: list[Event] = field(default_factory=list)
    """Of a watched run: what each thread has done for it."""

    def is_here(self) -> bool:
        """Whether all of its bytes have come, which another thread says."""
        return self.arrived

    @property
    def events(self) -> list[Event]:
        """What has been given to streams from there."""
        return [copy.event for copy in self.pushes if copy.event is not None]


class _AfterPushes(InPlace):
    """A delivery to memory that is still being copied from."""

    def __init__(
        self, memory: HostMemory, waiting: _Waiting, after: Sequence[Event], races: Races | None
    ) -> None:
        super().__init__(memory.memory, waiting.address)
        self._memory_of, self._waiting = memory, waiting
        self._after, self._races = after, races

    @contextmanager
    def room(self, piece: Piece) -> Iterator[memoryview]:
        for event in self._after:
            event.wait()
        with super().room(piece) as into:
            yield into
        if self._races is not None:
            self._tell(self._races, piece)

    def _tell(self, races: Races, piece: Piece) -> None:
        """Take note of what the calling thread has read; a push starts once the whole request is over."""
        start = self._waiting.address + piece.position
        part = self._memory_of.bytes(start, start + piece.needed_bytes)
        name, what = self._waiting.landing.name, "a read half the way"
        races.access(host_thread(), part, writes=True, name=name, what=what)
        self._waiting.reads.append(WatchedEvent(None, races.mark(host_thread()), races))


class HalfWay:
    """The pinned memory of a plan's arena in between, and what is in it."""

    def __init__(self, session: Session, plan: Plan) -> None:
        """Take the memory.

        Raises:
            DeviceError: so much cannot be pinned.
            UnsupportedOpError: the plan has something half the way elsewhere than in the host's memory.
        """
        self._session, self._places = session, fetched_to(plan.steps)
        elsewhere = sorted({*self._places.values()} - {HOST})
        if elsewhere or session.device.is_host:
            where = elsewhere[0] if elsewhere else HOST
            raise UnsupportedOpError(
                f"the plan of '{plan.workload.name}' lets weights wait in '{where}' on their way, which this runtime "
                f"does in '{HOST}' alone, for an accelerator; plan for a machine without a link to '{where}'"
            )
        self.links = tuple(dict.fromkeys(s.link for s in plan.steps if isinstance(s, Fetch)))
        """Of the first hop."""
        self.memory: HostMemory = session.pin(plan.arena_bytes[HOST])
        self._waiting: dict[str, _Waiting] = {}
        self._leaving: list[tuple[int, int, Event]] = []
        """Pushes of what has been evicted, with the bytes that they read."""
        session.host.half_ways.append(self)

    @staticmethod
    def of(session: Session, plan: Plan) -> HalfWay | None:
        """Return one where the plan has anything half the way."""
        is_there = any(isinstance(step, Fetch) for step in plan.steps)
        return HalfWay(session, plan) if is_there else None

    def has(self, tensor: str, link: str) -> bool:
        """Return whether a load over ``link`` is a push from here."""
        return self._places.get(tensor) == link.partition("->")[0]

    def fetch(self, landing: Landing, address: int, *, key: int, link: str, is_now: bool) -> None:
        """Take the room for a weight and start to read it, where ``is_now``, else when it is first pushed."""
        start = address + landing.shift_bytes
        source = self.memory.bytes(start, start + landing.size_bytes)
        self._waiting[landing.name] = waiting = _Waiting(landing, address, key, link, source)
        if is_now:
            self._read(waiting)

    def _read(self, waiting: _Waiting) -> None:
        landing, address = waiting.landing, waiting.address
        end = address + reserve_bytes(landing.size_bytes)
        self._leaving = [each for each in self._leaving if not each[2].reached or self._is_watched]
        after = [event for low, high, event in self._leaving if low < end and address < high]
        self._leaving = [e for e in self._leaving if not (address <= e[0] and e[1] <= end)]
        waiting.ticket = self._session.engine.submit(
            landing,
            address,
            key=waiting.key,
            link=waiting.link,
            memory=self._receive(waiting, after),
            on_done=partial(self._arrived, waiting),
            after=joined(after),
        )
        if not landing.pieces:
            self._arrived(waiting)

    @property
    def _is_watched(self) -> bool:
        return self._session.device.races is not None

    def _receive(self, waiting: _Waiting, after: Sequence[Event]) -> Receive:
        device, stagings = self._session.device, self._session.stagings
        if device.paces_links and stagings:
            return partial(stagings[0].delivery_to, self.memory)
        delivery = _AfterPushes(self.memory, waiting, after, device.races)
        return lambda *_: delivery

    def push(
        self, tensor: str, target: torch.Tensor, stream: CopyStream, after: Event | None
    ) -> Ticket:
        """Copy a weight to the device: at once where it is here, else when it comes."""
        waiting = self._waiting[tensor]
        if waiting.ticket is None:
            self._read(waiting)
        ticket = waiting.ticket
        assert ticket is not None, "it is asked for"

        def start() -> Event:
            ready = joined((ticket.event, after, *waiting.reads))
            return stream.copy(target, waiting.source, name=tensor, after=ready)

        copy = HostCopy(ticket, start)
        waiting.pushes.append(copy)
        if waiting.is_here():
            copy.go()
        else:
            waiting.queued.put(copy)
            if waiting.is_here():
                # It came in between: whoever takes a copy from the queue starts it.
                _start(waiting)
        return copy

    def _arrived(self, waiting: _Waiting) -> None:
        waiting.arrived = True
        _start(waiting)

    def newly_had(self, tensor: str, link: str) -> str:
        """Return the link of the first hop where nothing has been had of this read yet, else nothing."""
        waiting = self._waiting.get(tensor) if self.has(tensor, link) else None
        if waiting is None or waiting.is_counted:
            return ""
        waiting.is_counted = True
        return waiting.link

    def evict(self, tensor: str, *, spoil: bool) -> None:
        """Give a weight up, whose pushes are all on their way; spoil its bytes once they are through, if asked to."""
        waiting = self._waiting.pop(tensor)
        begin, end = waiting.address, waiting.address + reserve_bytes(waiting.landing.size_bytes)
        self._leaving += [(begin, end, event) for event in waiting.events]
        if spoil:
            for event in waiting.events:
                event.wait()
            self.memory.fill(begin, end, POISON)

    def forget(self) -> None:
        """Drop all that is here; nothing moves any more."""
        self._waiting.clear()
        self._leaving.clear()

    def close(self) -> None:
        """Give the memory back."""
        self._session.host.half_ways.remove(self)
        self.forget()
        self._session.unpin(self.memory)


def _start(waiting: _Waiting) -> None:
    while (copy := next_copy(waiting.queued)) is not None:
        copy.go()
