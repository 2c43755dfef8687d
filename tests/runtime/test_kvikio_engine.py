"""Reads by KvikIO, with a stand-in for the module: bytes, order, errors, and which path is really taken."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core.errors import DeviceError, StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.sources import Extent, WeightSource
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.transfer.kvikio_engine import KvikioEngine
from gascompile.runtime.transfer.kvikio_path import (
    CUFILE_COMPAT,
    GPU_DIRECT,
    KVIKIO_COMPAT,
    POSIX,
    TimedReader,
    path_taken,
)
from gascompile.runtime.transfer.read_plan import Landing, plan_landing
from tests.runtime.fake_kvikio import CompatMode, Kvikio
from tests.runtime.test_probe import HEALTHY
from tests.waiting import eventually

PAGE = 4096
IO = IoSettings(num_threads=3, chunk_bytes=2 * PAGE, engine="kvikio")


class Gate:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._waiting = threading.Semaphore(0)

    @property
    def reached(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._waiting.release()
        assert self._event.wait(60)

    def wait_for_waiters(self, count: int) -> None:
        """Return when ``count`` threads have come to wait."""
        for _ in range(count):
            assert self._waiting.acquire(timeout=60)

    def open(self) -> None:
        self._event.set()


def landing(path: Path, offset: int, size_bytes: int) -> Landing:
    extent = Extent(path=str(path), offset=offset, size_bytes=size_bytes)
    source = WeightSource(name="w", dtype="uint8", shape=(size_bytes,), extents=(extent,))
    return plan_landing(source, chunk_bytes=IO.chunk_bytes, is_direct=lambda path: True)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(1)
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        noise = torch.randint(0, 256, (10 * PAGE + 100,), generator=generator, dtype=torch.uint8)
        path.write_bytes(bytes(noise.tolist()))
    return paths


@pytest.mark.parametrize(
    ("module", "changes", "name", "reason"),
    [
        (Kvikio(), {}, GPU_DIRECT, ""),
        (Kvikio(compat=CompatMode.OFF, prefers_compat=True), {}, GPU_DIRECT, ""),
        (Kvikio(compat=CompatMode.ON), {}, KVIKIO_COMPAT, "KVIKIO_COMPAT_MODE"),
        (Kvikio(prefers_compat=True), {"has_udev": False}, KVIKIO_COMPAT, "/run/udev"),
        (Kvikio(gds=False), {}, CUFILE_COMPAT, "not available"),
        (Kvikio(), {"nvidia_fs": ""}, CUFILE_COMPAT, "nvidia-fs"),
    ],
)
def test_a_silent_fallback_is_found(
    module: Kvikio, changes: dict[str, Any], name: str, reason: str
) -> None:
    found = path_taken(module, replace(HEALTHY, **changes))
    assert found.name == name
    assert found.is_direct == (name == GPU_DIRECT)
    assert reason in found.reason


def test_bytes_arrive_and_files_are_opened_once(files: list[Path]) -> None:
    arena, module = Arena(32 * PAGE), Kvikio()
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    first, second = landing(files[0], 100, 5 * PAGE), landing(files[1], PAGE, 3 * PAGE)
    again = landing(files[0], 6 * PAGE, PAGE)
    tickets = [
        engine.submit(first, 0, key=2, link="nvme->gpu"),
        engine.submit(second, 8 * PAGE, key=0, link="nvme->gpu"),
        engine.submit(again, 16 * PAGE, key=1, link="nvme->gpu"),
    ]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done
        assert not ticket.failed
        assert ticket.event is None
    assert bytes(arena.memory[100 : 100 + 5 * PAGE]) == files[0].read_bytes()[100 : 100 + 5 * PAGE]
    assert bytes(arena.memory[8 * PAGE : 11 * PAGE]) == files[1].read_bytes()[PAGE : 4 * PAGE]
    assert bytes(arena.memory[16 * PAGE : 17 * PAGE]) == files[0].read_bytes()[6 * PAGE : 7 * PAGE]
    assert engine.paths == {"nvme->gpu": GPU_DIRECT}
    assert module.settings == {"num_threads": 3, "task_size": 2 * PAGE}
    engine.close()
    engine.close()
    assert sorted(module.opened) == sorted(module.closed) == sorted(map(str, files))
    with pytest.raises(StorageError, match="closed"):
        engine.submit(first, 0, key=0, link="nvme->gpu")


def test_nothing_is_read_into_a_reservation_that_is_in_use(files: list[Path]) -> None:
    arena, module, gate = Arena(32 * PAGE), Kvikio(), Gate()
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    held = engine.submit(landing(files[0], 0, PAGE), 0, key=0, link="nvme->gpu", after=gate)
    free = engine.submit(landing(files[1], 0, PAGE), 4 * PAGE, key=1, link="nvme->gpu")
    free.wait()
    assert not held.done
    assert [path for path, _, _ in module.reads] == [str(files[1])]
    gate.open()
    held.wait()
    assert bytes(arena.memory[:PAGE]) == files[0].read_bytes()[:PAGE]
    engine.close()


def test_a_failing_drive_is_a_storage_error_and_the_engine_goes_on(files: list[Path]) -> None:
    arena, module = Arena(32 * PAGE), Kvikio(fails_at=2 * PAGE)
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    ticket = engine.submit(landing(files[0], 0, 6 * PAGE), 0, key=0, link="nvme->gpu")
    with pytest.raises(StorageError, match=r"offset 8192 of .*one for 'w'.*cuFile error: 5"):
        ticket.wait()
    assert ticket.failed
    module.fails_at = -1
    engine.submit(landing(files[0], 0, 6 * PAGE), 0, key=0, link="nvme->gpu").wait()
    engine.close()


def test_a_truncated_file_is_said(files: list[Path]) -> None:
    module = Kvikio()
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=module, facts=HEALTHY)
    whole = landing(files[0], 0, 20 * PAGE)
    with pytest.raises(StorageError, match="ends too early"):
        engine.submit(whole, 0, key=0, link="nvme->gpu").wait()
    engine.close()


def test_a_fallback_is_part_of_the_report(files: list[Path]) -> None:
    facts = replace(HEALTHY, has_udev=False)
    engine = KvikioEngine(Arena(PAGE), IO, kvikio=Kvikio(prefers_compat=True), facts=facts)
    engine.submit(landing(files[0], 0, 10), 0, key=0, link="nvme->gpu").wait()
    assert engine.paths["nvme->gpu"].startswith(KVIKIO_COMPAT)
    assert "/run/udev" in engine.paths["nvme->gpu"]
    engine.close()


def test_memory_of_the_host_is_read_by_posix_calls_as_an_array(files: list[Path]) -> None:
    module, memory = Kvikio(), bytearray(4 * PAGE)
    engine = KvikioEngine(Arena(PAGE), IO, kvikio=module, facts=HEALTHY)
    wanted = landing(files[0], PAGE, 3 * PAGE)
    engine.submit(wanted, 0, key=0, link="nvme->cpu", memory=memoryview(memory)).wait()
    assert bytes(memory[: 3 * PAGE]) == files[0].read_bytes()[PAGE : 4 * PAGE]
    assert engine.paths == {"nvme->cpu": POSIX}
    assert all(module.to_host)
    engine.close()


def test_parts_below_its_own_threshold_are_reported_as_what_they_are(files: list[Path]) -> None:
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=Kvikio(gds_threshold=PAGE), facts=HEALTHY)
    engine.submit(landing(files[0], 0, 4 * PAGE), 0, key=0, link="whole").wait()
    engine.submit(landing(files[0], 0, 2 * PAGE + 9), 0, key=0, link="mixed").wait()
    engine.submit(landing(files[0], 0, 9), 0, key=0, link="small").wait()
    engine.close()
    both = f"{GPU_DIRECT} + {POSIX}"
    assert engine.paths == {"whole": GPU_DIRECT, "mixed": both, "small": POSIX}


def test_no_more_chunks_are_under_way_than_the_share_of_the_pool(files: list[Path]) -> None:
    module = Kvikio(before=lambda path, offset: time.sleep(0.001))
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=module, facts=HEALTHY, num_engines=2)
    tickets = [
        engine.submit(landing(files[0], 0, 10 * PAGE), 10 * PAGE * i, key=i, link="nvme->gpu")
        for i in range(6)
    ]
    for ticket in tickets:
        ticket.wait()
    assert module.settings["num_threads"] == 2 * IO.num_threads
    assert 1 < module.most_under_way[str(files[0])] <= IO.num_threads
    engine.close()


def test_a_failing_chunk_waits_for_the_others(files: list[Path]) -> None:
    slow, ended = 4 * PAGE, threading.Event()

    def before(path: str, offset: int) -> None:
        if offset == slow:
            time.sleep(0.05)
            ended.set()

    module = Kvikio(fails_at=2 * PAGE, before=before, fault=OSError(5, "Input/output error"))
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=module, facts=HEALTHY)
    with pytest.raises(StorageError, match=r"Input/output error; check the drive"):
        engine.submit(landing(files[0], 0, 6 * PAGE), 0, key=0, link="nvme->gpu").wait()
    assert ended.is_set(), "nothing writes behind the waiter's back"
    engine.close()


def test_a_cancelled_read_is_an_error_of_its_own(files: list[Path]) -> None:
    module, gate = Kvikio(), Gate()
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=module, facts=HEALTHY)
    wanted = landing(files[0], 0, PAGE)
    held = [engine.submit(wanted, 0, key=0, link="nvme->gpu", after=gate) for _ in range(5)]
    # A read is under way, and no longer cancelled, once one of the engine's four threads has taken it.
    gate.wait_for_waiters(4)
    drained = threading.Thread(target=engine.drain)
    known = engine.pool.num_messages
    drained.start()
    assert eventually(lambda: engine.pool.num_messages > known)
    gate.open()
    drained.join(60)
    for ticket in held[:4]:
        ticket.wait()
    with pytest.raises(StorageError, match="'w' was cancelled"):
        held[4].wait()
    engine.close()


def test_without_kvikio_there_is_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(DeviceError, match="No module named 'kvikio'") as caught:
        KvikioEngine(Arena(PAGE), IO, facts=HEALTHY)
    assert caught.value.cause == "no kvikio"


def test_a_measurement_reads_where_the_runtime_does(files: list[Path]) -> None:
    target = torch.zeros(4 * PAGE, dtype=torch.uint8)
    read = TimedReader(target, HEALTHY, kvikio=Kvikio())
    found = read(
        str(files[0]), offset=PAGE, size_bytes=2 * PAGE, into=memoryview(bytearray()), io=IO
    )
    assert found.path == GPU_DIRECT
    assert bytes(target[: 2 * PAGE].tolist()) == files[0].read_bytes()[PAGE : 3 * PAGE]
    slow = TimedReader(target, replace(HEALTHY, has_udev=False), kvikio=Kvikio(prefers_compat=True))
    memory = bytearray(2 * PAGE)
    found = slow(str(files[1]), offset=PAGE, size_bytes=PAGE, into=memoryview(memory), io=IO)
    assert found.path.startswith(KVIKIO_COMPAT)
    assert bytes(memory[:PAGE]) == files[1].read_bytes()[PAGE : 2 * PAGE]
    with pytest.raises(StorageError, match="read 100 of 4096"):
        read(str(files[0]), offset=10 * PAGE, size_bytes=PAGE, into=memoryview(bytearray()), io=IO)
