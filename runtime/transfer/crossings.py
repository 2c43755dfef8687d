"""Copies between processors that compute at once: each side comes to its half of a copy by itself.

The side that has made a value gives it. What the device gives goes to a slot of the host's memory; for what the host
gives, in such a slot, the device takes memory when it comes there itself, and who comes second starts the copy. So
each side takes and gives back its own memory alone, in its own order. Neither ever holds a lock, so that a run that
ends half way leaves nobody behind: ``abort`` lets all through.

What lasts does not cross where ops of the host change it: it rests there, in its slot, and the device waits for the op
before it fetches it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from gascompile.core.errors import GASCompileError, PlanMismatchError
from gascompile.core.op_sites import OpSites
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload
from gascompile.core.waiting import Gate
from gascompile.runtime.memory.device_moves import HostMove
from gascompile.runtime.memory.host_slots import area_bytes
from gascompile.runtime.memory.pinned import crossing_slots
from gascompile.runtime.memory.storages import bytes_of
from gascompile.runtime.protocols import CopyStream, Event, Instant, Ticket
from gascompile.runtime.stores import HostStore

if TYPE_CHECKING:
    from gascompile.runtime.run.session import Session


class AbortedError(GASCompileError):
    """The other side has failed, or the run was given up: what is waited for never comes."""


def _open(gate: Gate) -> None:
    try:
        if not gate.is_open:
            gate.open()
    except RuntimeError:
        pass  # the other side has, in between


class Crossing:
    """One copy of one run, through a slot of the host's memory that is its own."""

    __slots__ = (
        "_claims",
        "_layout",
        "_stream",
        "event",
        "failure",
        "mark",
        "source",
        "started",
        "target",
        "what",
    )

    def __init__(self, what: str, stream: CopyStream) -> None:
        """Know it."""
        self.what = what
        self._stream = stream
        self.source: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self._layout: tuple[Any, ...] | None = None
        """Of the value: dtype, offset in its storage, shape and strides, in elements."""
        self.mark: Event | None = None
        """Of the device: the value is made, or the memory free to write to."""
        self.event: Event | None = None
        self.failure: GASCompileError | None = None
        self.started = Gate()
        self._claims = deque((None,))

    def give(self, value: torch.Tensor, slot: torch.Tensor, mark: Event | None) -> None:
        """Hand over a value: of the device, which must stay as it is until ``given_up``, or of the host."""
        self._layout = (value.dtype, value.storage_offset(), value.size(), value.stride())
        source = bytes_of(value.untyped_storage())
        if source.nbytes > slot.nbytes:
            self.failure = PlanMismatchError(
                f"'{self.what}' has {source.nbytes} bytes, planned were {slot.nbytes}; plan for the larger input"
            )
            self.let_through()
            return
        if mark is None:
            slot = slot[: source.nbytes]
            source = slot.copy_(source)
        else:
            self.target = slot
        self.mark = mark or self.mark
        self.source = source
        self._start()

    def take(self, target: torch.Tensor, mark: Event) -> None:
        """Hand over memory of the device, as bytes, for what comes from the host."""
        self.mark = mark
        self.target = target
        self._start()

    def _start(self) -> None:
        """Start the copy if both its ends are there; one of two threads does."""
        source, target = self.source, self.target
        if source is None or target is None:
            return
        try:
            self._claims.pop()
        except IndexError:
            return
        self.event = self._stream.copy(
            target[: source.nbytes], source, name=self.what, after=self.mark
        )
        self.let_through()

    def let_through(self) -> None:
        """Open the gate; whoever waits finds the event, or none."""
        _open(self.started)

    def arrival(self) -> Event:
        """Block until the copy has been started, and return the event of its end.

        Raises:
            AbortedError: it never will be.
            PlanMismatchError: the value is larger than planned.
        """
        self.started.wait()
        if self.failure is not None:
            raise self.failure
        if self.event is None:
            raise AbortedError(f"'{self.what}' never comes: the run has ended")
        return self.event

    def given_up(self) -> None:
        """Keep the value no longer: its copy is there."""
        self.source = None

    def result(self) -> torch.Tensor:
        """Return the copy, which is there, laid out as the value; once."""
        target, layout = self.target, self._layout
        assert target is not None and layout is not None, "both ends were there"
        self.target = None
        dtype, offset, shape, strides = layout
        elements = target[: target.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return elements.as_strided(shape, strides, elements.storage_offset() + offset)


class Crossings:
    """The copies between the sites of one plan, and what each side does for them."""

    def __init__(self, plan: Plan, sites: OpSites, session: Session) -> None:
        """Take a slot for each in pinned memory; their streams are made here, as both sides use them later.

        Where a store has slots on the host, those are taken.

        Raises:
            DeviceError: so much memory cannot be pinned.
        """
        self._own, self._device = sites.own, session.device
        self._slots = crossing_slots(plan)
        self._links = {
            step.tensor: step.link
            for step in plan.steps
            if isinstance(step, (Offload, Reload)) and step.tensor in self._slots
        }
        # Nobody waits at once for what is queued: it goes in the turn of its link.
        self._streams = {
            name: self._device.stream(link, ahead=name not in sites.queued)
            for name, link in self._links.items()
        }
        self._store = session.store if isinstance(session.store, HostStore) else None
        self._memory = session.pin(area_bytes(self._slots)) if self._store is None else None
        self._lasting = frozenset(name for names in sites.changed.values() for name in names)
        self._changed: dict[str, Gate] = {}
        """Of what ops of the host change in the run at hand: opened when that is done."""
        self._is_aborted = False
        self._now: dict[str, Crossing] = {}
        self._link_bytes: dict[str, int] = {}
        self._stalled: list[tuple[int, str, Instant, Instant]] = []

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._links

    def begin(
        self, link_bytes: dict[str, int], stalled: list[tuple[int, str, Instant, Instant]]
    ) -> None:
        """Prepare a run, of which the device's side tells what moved and for what it waited."""
        self._link_bytes, self._stalled = link_bytes, stalled
        link_bytes.update({link: link_bytes.get(link, 0) for link in self._links.values()})
        self._is_aborted = False
        self._changed = {name: Gate() for name in self._lasting}
        self._now = {name: Crossing(name, self._streams[name]) for name in self._links}

    @property
    def tickets(self) -> dict[str, Ticket]:
        """The copies that have been started, by tensor."""
        events = ((name, crossing.event) for name, crossing in self._now.items())
        return {name: HostMove(event, None) for name, event in events if event is not None}

    def abort(self) -> None:
        """Let all who wait through."""
        self._is_aborted = True
        for crossing in list(self._now.values()):
            crossing.let_through()
        for gate in list(self._changed.values()):
            _open(gate)

    def end(self) -> None:
        """Keep nothing of a run."""
        self._now = {}

    def give(self, tensor: str, site: str, value: torch.Tensor) -> None:
        """Hand over what another site reads."""
        mark = self._device.mark() if site == self._own else None
        if self._store is not None:
            self._store.claim(tensor)
        self._now[tensor].give(value, self._slot(tensor), mark)

    def take(self, tensor: str, site: str) -> torch.Tensor | None:
        """Take the device's memory for what the host has made; return it as bytes. The host has its slots."""
        if site != self._own:
            return None
        size_bytes = self._slots[tensor][1]
        target = torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device)
        mark = self._device.mark()
        assert mark is not None, "a device has marks"
        self._now[tensor].take(target, mark)
        return target

    def arrive(self, op: int, tensor: str, site: str) -> torch.Tensor:
        """Block until a copy is there and return it; the device's compute waits, where that can."""
        self._meet(op, tensor, site)
        return self._now[tensor].result()

    def sent(self, op: int, tensor: str, site: str) -> None:
        """Let what is computed from then on take the value's memory: the host's is free, as its slot has the bytes."""
        if site == self._own:
            self._meet(op, tensor, site)
            self._now[tensor].given_up()

    def at_home(self, name: str) -> torch.Tensor:
        """Return what lasts where it rests on the host, as it lies on the device."""
        assert self._store is not None, "it has a home there"
        return self._store.at_home(name)

    def changes(self, names: Iterable[str]) -> None:
        """Take note that an op of the host is about to change what lasts: all other copies are old from now on."""
        assert self._store is not None, "they have a home there"
        self._store.changed_at_home(names)

    def has_changed(self, names: Iterable[str]) -> None:
        """Let the device fetch what an op of the host has changed."""
        for name in names:
            _open(self._changed[name])

    def follow(self, op: int, tensor: str) -> None:
        """Block until the host has changed what the device is about to fetch; that is a stall of op ``op``.

        Raises:
            AbortedError: it never will.
        """
        gate = self._changed[tensor]
        start = None if gate.is_open else self._device.clock()
        gate.wait()
        if self._is_aborted:
            raise AbortedError(f"'{tensor}' is never changed: the run has ended")
        if start is not None:
            self._stalled.append((op, tensor, start, self._device.clock()))

    def copied(self, tensor: str, link: str, value: torch.Tensor) -> torch.Tensor:
        """Copy a value at once, for a graph that is run directly."""
        self._link_bytes[link] += self._slots[tensor][1]
        device = self._device.torch_device if self._is_in(link) else "cpu"
        return value.to(device, copy=True)

    def _is_in(self, link: str) -> bool:
        return link.endswith(f"->{self._own}")

    def _slot(self, tensor: str) -> torch.Tensor:
        offset, size_bytes = self._slots[tensor]
        if self._memory is None:
            assert self._store is not None, "one of them has the slots"
            return self._store.slot(tensor, size_bytes)
        return self._memory.bytes(offset, offset + size_bytes)

    def _meet(self, op: int, tensor: str, site: str) -> None:
        crossing = self._now[tensor]
        if site != self._own:
            crossing.arrival().wait()
            return
        stalled = crossing.event is None or not crossing.event.reached
        start = self._device.clock() if stalled else None
        self._device.hold(crossing.arrival())
        self._link_bytes[self._links[tensor]] += self._slots[tensor][1]
        if stalled:
            self._stalled.append((op, tensor, start, self._device.clock()))
