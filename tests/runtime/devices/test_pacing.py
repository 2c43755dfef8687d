"""The time table of emulated links, by hand; and when a copy that a read came before has begun."""

from __future__ import annotations

import time

import pytest

from gascompile.runtime.devices import emulated
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Pacing
from tests.runtime.devices.machines import accelerator

MACHINE = accelerator(up=200.0, down=100.0, nvme=100.0, latency_s=1.0)


def test_copies_of_a_link_follow_each_other_and_pay_latency_once_per_transfer() -> None:
    pacing = Pacing(MACHINE)
    assert pacing.begin_s("gpu->cpu", 200, 10.0) == 11.0
    assert pacing.seconds("gpu->cpu", 200) == 2.0
    assert pacing.begin_s("gpu->cpu", 100, 10.0) == 14.0
    assert pacing.begin_s("gpu->cpu", 100, 20.0) == 21.0


def test_links_into_the_accelerator_share_its_pipe() -> None:
    pacing = Pacing(MACHINE)
    assert pacing.begin_s("nvme->gpu", 400, 0.0) == 1.0
    # At the pipe's own 200 bytes per second the bytes before would have passed after two seconds.
    assert pacing.begin_s("cpu->gpu", 200, 0.0) == 3.0
    # The link itself is at its 400 bytes until 5.0.
    assert pacing.begin_s("nvme->gpu", 100, 0.0) == 6.0


def test_a_transfer_ahead_waits_for_nothing_and_takes_its_share_of_the_link() -> None:
    pacing = Pacing(MACHINE)
    pacing.begin_s("nvme->gpu", 400, 0.0)
    assert pacing.begin_s("nvme->gpu", 100, 2.0, ahead=True) == 3.0
    assert pacing.begin_s("nvme->gpu", 100, 2.0) == 7.0


def test_copies_count_from_when_their_transfer_was_asked_for() -> None:
    """The bytes of the first transfer are read after those of the second: its place in the table stays."""
    device = EmulatedDevice(MACHINE)
    arena, host = device.arena(400), device.pinned(400)
    stream = device.stream("nvme->gpu")
    asked_s = time.perf_counter()
    bookings = [stream.book(20), stream.book(10)]
    between_s = time.perf_counter() - asked_s
    ends = []
    for booking, start, size_bytes in ((1, 20, 10), (0, 0, 10), (0, 10, 10)):
        part = slice(start, start + size_bytes)
        copy = stream.copy(
            arena.bytes(part.start, part.stop),
            host.bytes(part.start, part.stop),
            name="w",
            booking=bookings[booking],
        )
        copy.wait()
        assert isinstance(copy, emulated._Copy)
        ends.append(copy.end_s)
    device.close()
    slack_s = pytest.approx(asked_s, abs=between_s)
    assert [ends[1] - 1.1, ends[2] - 1.2, ends[0] - 2.3] == [slack_s] * 3


def test_an_event_is_reached_at_its_time_and_no_earlier() -> None:
    device = EmulatedDevice(MACHINE)
    arena, host = device.arena(64), device.pinned(64)
    copy = device.stream("cpu->gpu").copy(arena.bytes(0, 64), host.bytes(0, 64), name="w")
    assert isinstance(copy, emulated._Copy)
    reached = [copy.reached]
    copy.wait()
    assert time.perf_counter() >= copy.end_s
    assert [*reached, copy.reached] == [False, True]
    device.close()
