"""The time table of emulated links, by hand; and when a copy that a read came before has begun."""

from __future__ import annotations

import pytest

from gascompile.runtime.devices import emulated
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Pacing
from tests.runtime.devices.machines import accelerator

MACHINE = accelerator(up=200.0, down=100.0, nvme=100.0, latency_s=1.0)


def test_copies_of_a_link_follow_each_other_and_pay_latency_once_per_transfer() -> None:
    pacing = Pacing(MACHINE)
    assert pacing.end_s("gpu->cpu", 200, 10.0, opens=True) == 13.0
    assert pacing.end_s("gpu->cpu", 200, 10.0, opens=False) == 15.0
    assert pacing.end_s("gpu->cpu", 100, 20.0, opens=True) == 22.0


def test_links_into_the_accelerator_share_its_pipe() -> None:
    pacing = Pacing(MACHINE)
    assert pacing.end_s("nvme->gpu", 400, 0.0, opens=True) == 5.0
    # At the pipe's own 200 bytes per second the bytes before would have passed after two seconds.
    assert pacing.end_s("cpu->gpu", 200, 0.0, opens=True) == 4.0
    assert pacing.end_s("nvme->gpu", 100, 0.0, opens=False) == 6.0


def test_a_copy_counts_from_when_its_read_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(emulated, "sleep_until", ends.append)
    device = EmulatedDevice(MACHINE)
    arena, host = device.arena(400), device.pinned(400)
    stream = device.stream("nvme->gpu")
    for start, since_s in ((0, 1e9), (200, 1e9), (0, 2e9)):
        part = slice(start, start + 200)
        stream.copy(
            arena.bytes(part.start, part.stop),
            host.bytes(part.start, part.stop),
            name="w",
            opens=start == 0,
            since_s=since_s,
        ).wait()
    device.close()
    assert ends == [1e9 + 3, 1e9 + 5, 2e9 + 3]
