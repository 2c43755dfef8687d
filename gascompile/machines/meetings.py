"""Meetings: what it takes two threads of ops to hand values to each other, by the code that does so in a run.

Each side has an op beside the copies, as in a run: threads are asleep when what they wait for comes, and want the same
interpreter. The links take no time here, so that what is left is what the host does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from gascompile.core.machine import Link, Machine, Place
from gascompile.core.sizes import KIB, MIB
from gascompile.core.waiting import OwnThread
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.protocols import Event
from gascompile.runtime.transfer.crossings import Crossing

_SIZES = (64 * KIB, 1 * MIB)
"""Of what crosses: values of a few rows, and of many."""
_ROUNDS = 24
"""Of each size. [Empirical] A round takes 2 ms; of so many the medians differ by 10 % from one time to the next."""
_STARTS = 9
"""Threads that are started."""
_QUICK = Machine(
    name="two sites",
    places=(Place.named("gpu", 1 << 30), Place.named("cpu", 1 << 30)),
    links=tuple(
        Link(source_tier=a, target_tier=b, bandwidth_bytes_per_s=1e15)
        for a, b in (("gpu", "cpu"), ("cpu", "gpu"))
    ),
)


def with_meetings(machine: Machine) -> Machine:
    """Return ``machine`` with what its processor takes to bring two sites together; about 0.2 s.

    One without a ``contention`` stays as it is.
    """
    if machine.contention is None:
        return machine
    start_s = statistics.median(_start_s() for _ in range(_STARTS))
    device = EmulatedDevice(_QUICK)
    try:
        few, many = (_Rounds(device, size_bytes).run() for size_bytes in _SIZES)
    finally:
        device.close()
    per_byte_s = max(0.0, many.give_s - few.give_s) / (_SIZES[1] - _SIZES[0])
    contention = replace(
        machine.contention,
        start_s=start_s,
        give_s=max(0.0, few.give_s - _SIZES[0] * per_byte_s),
        give_s_per_byte=per_byte_s,
        wake_s=few.wake_s,
    )
    return replace(machine, contention=contention)


def _op() -> Callable[[], object]:
    left, right = torch.ones(64, 512), torch.ones(512, 512)
    return lambda: torch.nn.functional.linear(left, right)


def _start_s() -> float:
    """Return the seconds from the start of a thread of ops until its first one, beside an op."""
    op, at_s = _op(), []

    def work() -> None:
        torch.get_num_threads()
        with torch.inference_mode():
            at_s.append(time.perf_counter())

    op()
    begun_s = time.perf_counter()
    thread = OwnThread(work, "gascompile-meeting")
    op()
    thread.join()
    return at_s[0] - begun_s


@dataclass
class _Rounds:
    """Values that go out and back."""

    device: EmulatedDevice
    size_bytes: int
    begun_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """When values are handed over, out and back."""
    ended_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """When that is done."""
    woken_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """When the other side has them."""

    def run(self) -> _Rounds:
        """Go through all rounds."""
        streams = [self.device.stream(link, ahead=True) for link in ("gpu->cpu", "cpu->gpu")]
        rounds = [tuple(Crossing("value", stream) for stream in streams) for _ in range(_ROUNDS)]
        slots = [torch.empty(self.size_bytes, dtype=torch.uint8) for _ in streams]
        op = _op()
        other = OwnThread(lambda: self._answer(rounds, slots[1]), "gascompile-meeting")
        for out, back in rounds:
            op()
            self._give(0, out, slots[0], self.device.mark())
            back.take(torch.empty_like(slots[1]), self.device.mark())
            self.device.hold(back.arrival())
            self.woken_s[1].append(time.perf_counter())
            back.result()
        other.join()
        return self

    def _answer(self, rounds: Sequence[Sequence[Crossing]], slot: torch.Tensor) -> None:
        torch.get_num_threads()
        op = _op()
        for out, back in rounds:
            out.arrival().wait()
            self.woken_s[0].append(time.perf_counter())
            out.result()
            op()
            self._give(1, back, slot, None)

    def _give(self, way: int, crossing: Crossing, slot: torch.Tensor, mark: Event | None) -> None:
        value = torch.ones(self.size_bytes // 4)
        self.begun_s[way].append(time.perf_counter())
        crossing.give(value, slot, mark)
        self.ended_s[way].append(time.perf_counter())

    @property
    def give_s(self) -> float:
        """The median of both ways."""
        return self._between_s(self.begun_s, self.ended_s)

    @property
    def wake_s(self) -> float:
        """The median of both ways; the other side may be there before this one is done with giving."""
        return max(0.0, self._between_s(self.ended_s, self.woken_s))

    @staticmethod
    def _between_s(begun: Sequence[Sequence[float]], ended: Sequence[Sequence[float]]) -> float:
        pairs = (pair for way in (0, 1) for pair in zip(begun[way], ended[way], strict=True))
        return statistics.median(end_s - begin_s for begin_s, end_s in pairs)
