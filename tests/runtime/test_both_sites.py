"""What ops of both processors have of this machine: threads as asked for, memory that is kept, processors."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from gascompile.core.waiting import OwnThread
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.memory.run_memory import SiteMemory
from tests.runtime.devices.machines import accelerator

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")


class Held:
    """Page memory that writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def activate(self, on: int) -> None:
        self.asked.append(("active", on))

    def limit(self, limit_bytes: int) -> None:
        self.asked.append(("limit", limit_bytes))

    def trim(self) -> None:
        self.asked.append(("trim", 0))


@pytest.mark.parametrize("in_ram", [True, False])
def test_pages_are_kept_for_the_ops_of_a_run_and_given_back_at_its_end(in_ram: bool) -> None:
    held = Held()
    memory = SiteMemory(held, 1000, in_ram=in_ram)  # type: ignore[arg-type]  # does what is asked of pages
    memory.begin(5)
    memory.limit_pages(5)
    memory.serve(1)
    memory.lane()(1)
    memory.make_room(1 << 30)
    assert not memory.is_due(1 << 30)
    memory.end()
    # The ops of a device with memory of its own take none of the host's.
    own = [("active", 1)] if in_ram else []
    assert held.asked == [*own, ("limit", 1000), ("active", 1), ("trim", 0)]


def nice_since(before: list[str]) -> list[int]:
    """Return how nice the threads are that were not there before; those of earlier tests may end meanwhile."""
    new = set(os.listdir("/proc/self/task")) - set(before)
    return sorted(os.getpriority(os.PRIO_PROCESS, int(number)) for number in new)


@LINUX
def test_copies_give_way_once_ops_run_on_both_sides_but_for_those_that_these_wait_for() -> None:
    before, own = os.listdir("/proc/self/task"), os.getpriority(os.PRIO_PROCESS, 0)
    lowest = min(19, own + 19)
    source, target = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    device = EmulatedDevice(accelerator(up=1e9, nvme=1e9, latency_s=0.0))
    try:
        queued = device.stream("cpu->gpu")
        queued.copy(target, source, name="w").wait()
        assert nice_since(before) == [own]
        ahead = device.stream("cpu->gpu", ahead=True)
        later = device.stream("gpu->cpu")
        for stream in (queued, ahead, later):
            stream.copy(target, source, name="w").wait()
        assert nice_since(before) == [own, lowest, lowest]
    finally:
        device.close()
    assert torch.equal(target, source)


def test_who_hands_a_value_over_copies_it_and_it_counts_when_its_link_would_have_it() -> None:
    source, target = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    device = EmulatedDevice(accelerator(up=1e9, nvme=1e9, latency_s=600.0))
    event = device.stream("cpu->gpu", ahead=True).copy(target, source, name="x")
    assert torch.equal(target, source)
    assert not event.reached
    device.close()


def test_the_time_table_keeps_no_copies_that_are_over() -> None:
    device = EmulatedDevice(accelerator(up=1e9, nvme=1e9, latency_s=0.0))
    source, target = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    ahead = device.stream("cpu->gpu", ahead=True)
    for _ in range(100):
        ahead.copy(target, source, name="x").wait()
    device.synchronize()
    assert device._pacing.num_asked == 0
    device.close()


@LINUX
def test_an_own_thread_that_asks_for_the_number_of_threads_makes_no_more() -> None:
    """What ``Lane`` relies on: a thread takes on what ``set_num_threads`` said when it asks for the number."""
    number, left = torch.get_num_threads(), torch.ones(128, 256)
    counted: list[int] = []

    def work() -> None:
        assert torch.get_num_threads() == 1
        before = set(os.listdir("/proc/self/task"))
        torch.nn.functional.gelu(torch.nn.functional.linear(left, torch.ones(256, 256)))
        counted.append(len(set(os.listdir("/proc/self/task")) - before))

    torch.set_num_threads(1)
    try:
        OwnThread(work, "gascompile-test").join()
    finally:
        torch.set_num_threads(number)
    assert counted == [0]
