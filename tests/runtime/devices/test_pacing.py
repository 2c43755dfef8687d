"""The time table of emulated links, by hand; and when a copy that a read came before has begun."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.sources import Extent, WeightSource
from gascompile.runtime.devices import emulated
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Pacing
from gascompile.runtime.memory.staging import Staging
from gascompile.runtime.transfer.engine import Engine
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.read_plan import plan_landing
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


def test_a_byte_takes_of_a_pipe_what_its_link_says() -> None:
    first, second, *others = MACHINE.links
    links = (first, replace(second, pipe_bytes_per_byte=2.5), *others)
    pacing = Pacing(replace(MACHINE, links=links))
    assert pacing.begin_s("nvme->gpu", 400, 0.0) == 1.0
    assert pacing.begin_s("cpu->gpu", 200, 0.0) == 6.0


def test_a_transfer_ahead_waits_for_nothing_and_takes_its_share_of_the_link() -> None:
    pacing = Pacing(MACHINE)
    pacing.begin_s("nvme->gpu", 400, 0.0)
    pacing.take("nvme->gpu", 100, 2.0)
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


def test_a_cancelled_booking_leaves_its_time_to_others() -> None:
    device = EmulatedDevice(accelerator(up=200.0, nvme=100.0, latency_s=0.0))
    arena, host = device.arena(64), device.pinned(64)
    stream = device.stream("nvme->gpu")
    start_s = time.perf_counter()
    booking = stream.book(4000)
    stream.copy(arena.bytes(0, 10), host.bytes(0, 10), name="w", booking=booking)
    booking.cancel()
    booking.cancel()
    given_s = time.perf_counter() - start_s
    ends: list[float] = []
    copies = [
        device.stream(link).copy(arena.bytes(16, 26), host.bytes(16, 26), name="v")
        for link in ("nvme->gpu", "cpu->gpu")
    ]
    for copy in copies:
        copy.wait()
        assert isinstance(copy, emulated._Copy)
        ends.append(copy.end_s - start_s)
    device.close()
    # Bytes 0 to 10 take the link 0.1 s, the next ten until 0.2; its pipe admits the third at 0.15.
    assert ends == [pytest.approx(0.2, abs=given_s + 1e-6)] * 2


def test_a_read_that_fails_or_is_cancelled_keeps_no_place_on_its_link(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(PAGE_BYTES))
    machine = accelerator(nvme=1.0, latency_s=0.0)
    device = EmulatedDevice(machine)
    arena, files = device.arena(2 * PAGE_BYTES), SourceFiles([str(path)])
    staging = Staging(device, arena, machine.io)
    begun, gate = threading.Event(), threading.Event()

    def reader(descriptor: int, into: memoryview, offset: int) -> int:
        begun.set()
        gate.wait()
        raise OSError(5, "the drive is gone")

    engine = Engine(files, staging.delivery, IoSettings(num_threads=1), reader=reader)
    source = WeightSource(
        name="w",
        dtype="uint8",
        shape=(PAGE_BYTES,),
        extents=(Extent(path=str(path), offset=0, size_bytes=PAGE_BYTES),),
    )
    landing = plan_landing(source, chunk_bytes=PAGE_BYTES, is_direct=files.is_direct)
    tickets = [engine.submit(landing, 0, key=0, link="nvme->gpu")]
    assert begun.wait(10)
    tickets.append(engine.submit(landing, 0, key=1, link="nvme->gpu"))
    drain = threading.Thread(target=engine.drain)
    drain.start()
    while engine.pool.num_messages < 2:
        time.sleep(0.001)
    gate.set()
    with pytest.raises(StorageError, match="cancelled"):
        tickets[1].wait()
    drain.join()
    assert tickets[0].failed
    engine.close()
    files.close()
    # The two would have taken over two hours.
    start_s = time.perf_counter()
    copy = device.stream("nvme->gpu").copy(arena.bytes(0, 0), arena.bytes(0, 0), name="v")
    copy.wait()
    assert isinstance(copy, emulated._Copy)
    assert copy.end_s - start_s < 60
    device.close()
