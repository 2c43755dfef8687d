"""An accelerator that every machine has: a bounded piece of RAM behind links of set bandwidths.

Each link is a thread that copies in the order it was given, at the pace of the machine's numbers; events are
what it has done. Compute runs on the host and blocks where a device's compute stream would wait. So plans for
three tiers run, in the time that they predict, where there is no accelerator; with late copies and a
``Disorder`` whatever they leave unordered comes out wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial

import torch

from gascompile.core.errors import DeviceError
from gascompile.core.machine import Machine
from gascompile.core.sizes import MIB
from gascompile.core.waiting import Gate, OwnThread
from gascompile.runtime.devices.cpu import DeviceInRam
from gascompile.runtime.devices.pacing import Disorder, Pacing, sleep_until
from gascompile.runtime.memory.arena import POISON, Arena
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.protocols import Booking, Event

_LIBC = ctypes.CDLL(None)
"""Unlike ``ctypes.memmove`` it lets other threads run meanwhile: those of other links, and compute."""
_LIBC.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LIBC.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_NICER = 19
"""By how much threads of links give way to ops where these keep both processors busy. [Empirical] On two cores, copies
of 36 MiB beside ops on both lengthened a call of 71 ms by 6 ms; with 10 by 4, with 19 by 3."""
_AT_ONCE_BYTES = 4 * MIB
"""Of a copy between ops of two processors that who starts it makes by itself. [Empirical] A MiB takes 0.1 to 0.2 ms, as
long as to wake a thread for it on two busy processors."""
_MOST_ASKED = 64
"""Entries of the time table that wait for a thread of a link before one is woken for them alone."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The event of the compute stream: the host computes, so what it was given is done."""

    lag_s: float = 0.0
    """By how much later than on a device: a thread wakes up some time after what it waited for."""
    reached = True

    def wait(self) -> None:
        pass


class EmulatedBooking:
    """A transfer in the time table of its link: entered when it was asked for, or once what it waits for is over."""

    def __init__(
        self, link: str, pacing: Pacing, size_bytes: int, after: Event | None, *, ahead: bool
    ) -> None:
        self._link = link
        self._ahead = ahead
        self._pacing = pacing
        self._size_bytes = size_bytes
        self._given_bytes = 0
        self._first_s = 0.0
        self._passed_s = 0.0
        self._is_entered = self.is_asked = False
        if after is None or after.reached:
            self.ask(time.perf_counter() - (after.lag_s if isinstance(after, _Done) else 0.0))

    def ask(self, ready_s: float) -> None:
        """Plan the transfer, which could begin at ``ready_s``, after all that were asked for before."""
        self.is_asked = True
        if self._ahead:
            # It waits for nobody, so that when it begins is known without the time table.
            self._first_s = self._passed_s = ready_s + self._pacing.latency_s(self._link)
            self._is_entered = True
        self._pacing.ask(partial(self._enter, ready_s))

    def _enter(self, ready_s: float) -> None:
        if self._ahead:
            self._pacing.take(self._link, self._size_bytes, ready_s)
            return
        self._first_s = self._passed_s = self._pacing.begin_s(self._link, self._size_bytes, ready_s)
        self._is_entered = True

    def give(self, size_bytes: int) -> None:
        """Note that a copy of so many bytes was queued."""
        self._given_bytes += size_bytes

    def cancel(self) -> None:
        self._pacing.ask(partial(self._cancel, time.perf_counter()))

    def _cancel(self, now_s: float) -> None:
        if self._is_entered:
            given_s = self._first_s + self._pacing.seconds(self._link, self._given_bytes)
            end_s = self._first_s + self._pacing.seconds(self._link, self._size_bytes)
            unused_s = end_s - max(given_s, now_s)
            if unused_s > 0:
                self._pacing.give_back(self._link, unused_s)
        self._size_bytes = self._given_bytes

    def seconds_of(self, copy: _Copy) -> float:
        """Return how long the bytes of a copy take to pass."""
        return self._pacing.seconds(
            self._link, copy.target.nbytes if copy.target is not None else 0
        )

    def pass_next(self, size_bytes: int) -> float:
        """Return when the next ``size_bytes`` have passed; for the thread of the link, after what was asked."""
        self._passed_s += self._pacing.seconds(self._link, size_bytes)
        return self._passed_s


@dataclass(slots=True)
class _Copy:
    """A copy in its link's queue; its own end as an ``Event``."""

    target: torch.Tensor | None
    source: torch.Tensor | None
    after: Event | None
    booking: EmulatedBooking
    begun_s: float = 0.0
    end_s: float = 0.0
    """When it ends, on the clock of ``time.perf_counter``; known once its bytes are there."""
    _moved: Gate = field(default_factory=Gate)

    @property
    def reached(self) -> bool:
        return self._moved.is_open and time.perf_counter() >= self.end_s

    def wait(self) -> None:
        self._moved.wait()
        # By the clock, not by a thread of the link: it would wake up late, and so would who waits for it.
        sleep_until(self.end_s)

    def moved(self, end_s: float, time_s: float) -> None:
        """Note that the bytes are there, though nobody may know of it before ``end_s``; they passed for ``time_s``."""
        # Whoever keeps the event keeps no memory.
        self.target = self.source = self.after = None
        self.begun_s, self.end_s = end_s - time_s, end_s
        self._moved.open()


class EmulatedStream:
    """One link: a queue and a thread."""

    def __init__(
        self, link: str, pacing: Pacing, *, late: bool, ahead: bool, gives_way: bool
    ) -> None:
        self._link = link
        self._ahead = ahead
        self._pacing = pacing
        self._is_closed = False
        self._copies = _Copies(pacing, late=late, gives_way=gives_way)
        weakref.finalize(self, self._copies.queue.put, None).atexit = False
        self._thread = OwnThread(self._copies.serve, f"gascompile-link-{link}")

    def book(self, size_bytes: int, *, after: Event | None = None) -> EmulatedBooking:
        return EmulatedBooking(self._link, self._pacing, size_bytes, after, ahead=self._ahead)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        name: str,  # noqa: ARG002 - part of the protocol
        after: Event | None = None,
        booking: Booking | None = None,
    ) -> Event:
        assert target.nbytes == source.nbytes, "a copy is of one size"
        booked = booking or self.book(target.nbytes, after=after)
        assert isinstance(booked, EmulatedBooking), "a booking of this device"
        booked.give(target.nbytes)
        copy = _Copy(target, source, after, booked)
        if self._ahead and booked.is_asked and self._copies.may_be_made_here(target.nbytes):
            self._copies.make_here(copy)
        else:
            self._copies.queue.put(copy)
        return copy

    def give_way(self) -> None:
        """Let ops that want the same processors go first; nobody waits at once for what is queued here."""
        self._copies.gives_way = not self._ahead

    def synchronize(self) -> None:
        if self._is_closed:
            self._thread.join()
        elif self._thread.is_alive:
            gate = Gate()
            self._copies.queue.put(gate)
            gate.wait()
            sleep_until(self._copies.end_s)

    def close(self) -> None:
        self._is_closed = True
        self._copies.queue.put(None)
        self._thread.join()


class _Copies:
    """The copies of one link, made one after the other by its thread."""

    def __init__(self, pacing: Pacing, *, late: bool, gives_way: bool) -> None:
        self.queue: queue.SimpleQueue[_Copy | Gate | None] = queue.SimpleQueue()
        self.end_s = 0.0
        """When the last one ends."""
        self.gives_way = gives_way
        """Whether ops go first, from the next copy on."""
        self._pacing = pacing
        self._late = late

    def may_be_made_here(self, size_bytes: int) -> bool:
        """Return whether who starts a copy may make it: it takes little time, and nothing is late on purpose."""
        return not self._late and not self._pacing.is_disturbed and size_bytes <= _AT_ONCE_BYTES

    def make_here(self, copy: _Copy) -> None:
        """Make a copy that goes beside what the link is at, on the calling thread: no other is woken for it."""
        time_s = copy.booking.seconds_of(copy)
        end_s = self._carry_out(copy)
        self.end_s = max(self.end_s, end_s)
        copy.moved(end_s, time_s)
        if self._pacing.num_asked > _MOST_ASKED:
            self.queue.put(Gate())

    def serve(self) -> None:
        """Make copies until there is a ``None``; a gate is opened once those before it are made."""
        while (copy := self.queue.get()) is not None:
            if isinstance(copy, Gate):
                self._pacing.enter_asked()
                copy.open()
            else:
                if self.gives_way:
                    self.gives_way = False
                    _give_way()
                self._make(copy)
            del copy

    def _make(self, copy: _Copy) -> None:
        if copy.after is not None and not copy.after.reached:
            copy.after.wait()
        if not copy.booking.is_asked:
            copy.booking.ask(time.perf_counter())
        self._pacing.enter_asked()
        time_s = copy.booking.seconds_of(copy)
        self.end_s = self._carry_out(copy)
        copy.moved(self.end_s, time_s)

    def _carry_out(self, copy: _Copy) -> float:
        """Move the bytes and return when the link would have; late ones are moved no earlier."""
        target, source = copy.target, copy.source
        assert target is not None
        assert source is not None
        if self._late:
            _LIBC.memset(target.data_ptr(), POISON, target.nbytes)
        end_s = copy.booking.pass_next(target.nbytes) + self._pacing.delay_s()
        if self._late:
            sleep_until(end_s)
        _LIBC.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return end_s


def _give_way() -> None:
    """Let other threads have the processors first: a real accelerator's copies take none."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        number = threading.get_native_id()
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, number) + _NICER
            os.setpriority(os.PRIO_PROCESS, number, nice)


class EmulatedDevice(DeviceInRam):
    """The accelerator of a machine whose backend is ``emulated``."""

    name = "emulated"
    is_host = False
    paces_links = True

    def __init__(
        self, machine: Machine, *, disorder: Disorder | None = None, late: bool = False
    ) -> None:
        """Describe the accelerator; its threads start with the first copy of each link.

        Args:
            machine: its links, pipes and the size of the tier that computes.
            disorder: delays to add.
            late: bytes on their way are spoiled, and appear at the very end of their copy.
        """
        self.capacity_bytes = machine.tiers[machine.compute_tier].size_bytes
        self._machine = machine.name
        self._pacing = Pacing(machine, disorder)
        self._late = late
        self._streams: dict[tuple[str, bool], EmulatedStream] = {}
        self._lag_s = 0.0

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> Arena:
        if size_bytes > self.capacity_bytes:
            if early is not None:
                early.discard()
            raise DeviceError(
                f"the emulated accelerator of '{self._machine}' has {self.capacity_bytes} bytes, the arena takes "
                f"{size_bytes}; plan for a smaller budget"
            )
        return super().arena(size_bytes, early)

    def stream(self, link: str, *, ahead: bool = False) -> EmulatedStream:
        key = (link, ahead)
        if key not in self._streams:
            if link not in self._pacing:
                raise DeviceError(
                    f"the machine '{self._machine}' has no link '{link}'; plan for this machine"
                )
            # What goes ahead is between ops of both processors: none of those of the host idles then.
            gives_way = not ahead and any(is_ahead for _, is_ahead in self._streams)
            self._streams[key] = EmulatedStream(
                link, self._pacing, late=self._late, ahead=ahead, gives_way=gives_way
            )
            for stream in self._streams.values() if ahead else ():
                stream.give_way()
        return self._streams[key]

    def begin(self) -> None:
        self._lag_s = 0.0

    def mark(self) -> Event:
        return _Done(self._lag_s)

    def hold(self, event: Event) -> None:
        """Block until ``event``. What is given to links from then on counts from its end: nothing wakes up there."""
        given_s = time.perf_counter() - self._lag_s
        event.wait()
        end_s = event.end_s if isinstance(event, _Copy) else given_s
        self._lag_s = max(time.perf_counter() - max(given_s, end_s), 0.0)

    def synchronize(self) -> None:
        for stream in list(self._streams.values()):
            stream.synchronize()

    def place(self, value: torch.Tensor) -> torch.Tensor:
        # What the host holds is not in the accelerator's memory: inputs take room there, as on a real one.
        return value.clone()

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
