"""What a session reads with: the engine that the plan names, the path that is reported, drives beside each other."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core.errors import DeviceError, RaceError, StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.plan import Plan
from gascompile.core.sources import Extent, WeightSource
from gascompile.core.waiting import own_threads
from gascompile.passes.graph.insert import insert
from gascompile.runtime.debug.watched import WatchedDevice
from gascompile.runtime.devices import probe
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.protocols import Event, Memory, Reader, TransferEngine, read_at
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.kvikio_engine import KvikioEngine
from gascompile.runtime.transfer.kvikio_path import GPU_DIRECT, KVIKIO_COMPAT
from gascompile.runtime.transfer.read_plan import plan_landing
from gascompile.runtime.transfer.reading import open_engine
from gascompile.runtime.transfer.routing import drive_of, share
from tests.runtime.devices.machines import accelerator
from tests.runtime.fake_kvikio import Kvikio, uninstall
from tests.runtime.test_probe import HEALTHY
from tests.runtime.toys import Toy, make_plan, mlp

IO = IoSettings(num_threads=2, chunk_bytes=16 << 10, engine="kvikio")
FAST = accelerator(up=1e11, down=1e11, nvme=1e11, latency_s=1e-6, io=IO)
NVME = replace(FAST, links=tuple(x for x in FAST.links if x.name != "cpu->gpu"))
LINK = "nvme->gpu"


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    """GPUDirect Storage is active."""
    monkeypatch.setattr(probe, "look", lambda: HEALTHY)
    return Kvikio().install(monkeypatch)


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    """A container without /run/udev."""
    monkeypatch.setattr(probe, "look", lambda: replace(HEALTHY, has_udev=False))
    return Kvikio(prefers_compat=True).install(monkeypatch)


def streamed(folder: Path, *, io: IoSettings = IO, residents: int = 1) -> tuple[Toy, Plan]:
    toy = mlp(folder, layers=4)
    stay = frozenset(list(toy.weights)[:residents])
    return toy, make_plan(toy.workload, residents=stay, seed=2, io=io, machine=NVME)


def assert_runs(toy: Toy, plan: Plan, *, runs: int = 3, reader: Reader = read_at) -> dict[str, str]:
    """Run, compare with eager, and return the paths of the last report."""
    with toy.session(plan, reader=reader) as session:
        executor = toy.executor(session, plan)
        for _ in range(runs):
            x = torch.randn(4, 96)
            for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
                assert torch.equal(ours, eager)
        assert executor.last_run is not None
        return dict(executor.last_run.paths)


# ---------------------------------------------------------------- the engine that the plan names


def test_a_plan_for_kvikio_reads_straight_to_the_device(tmp_path: Path, direct: Kvikio) -> None:
    toy, plan = streamed(tmp_path)
    assert assert_runs(toy, plan) == {LINK: GPU_DIRECT}
    assert direct.reads
    assert direct.opened == direct.closed == [str(toy.path)], "opened once, for all runs"
    assert direct.settings == {"num_threads": 2, "task_size": 16 << 10}


def test_the_direct_path_pins_no_memory(tmp_path: Path, direct: Kvikio) -> None:
    toy, plan = streamed(tmp_path)
    with toy.session(plan) as session:
        assert session.pinned_bytes == 0


def test_a_plan_for_reads_does_not_touch_kvikio(tmp_path: Path, direct: Kvikio) -> None:
    toy, plan = streamed(tmp_path, io=replace(IO, engine="reads"))
    assert GPU_DIRECT not in assert_runs(toy, plan)[LINK]
    assert not direct.opened


def test_a_silent_fallback_goes_through_planned_memory_and_is_said(
    tmp_path: Path, compat: Kvikio, caplog: pytest.LogCaptureFixture
) -> None:
    toy, plan = streamed(tmp_path)
    with caplog.at_level(logging.WARNING, logger="gascompile"):
        paths = assert_runs(toy, plan)
    assert paths[LINK].startswith(KVIKIO_COMPAT)
    assert "/run/udev cannot be read" in paths[LINK]
    assert sum("/run/udev" in record.message for record in caplog.records) == 1
    assert compat.reads
    assert all(compat.to_host), "KvikIO must not pin memory of its own"
    with toy.session(plan) as session:
        assert session.pinned_bytes == IO.staging_bytes


def test_without_kvikio_the_plan_is_refused_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninstall(monkeypatch)
    toy, plan = streamed(tmp_path)
    threads = own_threads()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match=r"pip install 'gascompile\[gpu\]', or measure") as caught:
        toy.session(plan)
    assert caught.value.cause == probe.NO_KVIKIO
    assert own_threads() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_small_tensors_and_those_of_the_host_take_aligned_reads(
    tmp_path: Path, direct: Kvikio
) -> None:
    toy = mlp(tmp_path, layers=4)
    sizes = {name: source.size_bytes for name, source in toy.sources.items()}
    least_bytes = max(sizes.values())
    io = replace(IO, least_bytes=least_bytes)
    plan = make_plan(toy.workload, seed=2, io=io, machine=NVME)
    names = set(assert_runs(toy, plan)[LINK].split(" + "))
    assert GPU_DIRECT in names
    assert names & {"O_DIRECT", "page cache"}
    assert min(size for _, _, size in direct.reads) >= 4096, "a bias lies within a page"
    direct.reads.clear()
    host = replace(FAST, links=tuple(x for x in FAST.links if x.name != LINK))
    assert_runs(toy, make_plan(toy.workload, seed=2, io=IO, machine=host))
    assert not direct.reads


@pytest.mark.parametrize("seed", range(2))
def test_reads_to_the_device_are_ordered_in_any_timing(
    tmp_path: Path, seed: int, direct: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = mlp(tmp_path, layers=3, width=32)
    plan = make_plan(toy.workload, seed=seed, io=IO, machine=FAST)
    disorder = Disorder(seed=seed, longest_delay_s=1e-4)
    device = WatchedDevice(EmulatedDevice(FAST, disorder=disorder, late=True))
    with toy.session(plan, device=device) as session:
        executor = toy.executor(session, plan, paranoid=True)
        for _ in range(20):
            x = torch.randn(4, 32)
            for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
                assert torch.equal(ours, eager)
    assert direct.reads
    assert device.races.num_checked > 20 * len(plan.steps) / 4


class Hasty(WatchedDevice):
    """A device whose compute never holds on anything."""

    def hold(self, event: Event) -> None:
        pass


def run_watched(toy: Toy, plan: Plan, device: WatchedDevice) -> None:
    with toy.session(plan, device=device) as session:
        executor = Executor(session, insert(toy.program, plan), plan, paranoid=True, measure=False)
        for _ in range(3):
            executor.run(torch.randn(4, 32))


def test_a_read_to_the_device_that_nothing_orders_is_a_race(
    tmp_path: Path, direct: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = mlp(tmp_path, layers=4, width=32)
    plan = make_plan(toy.workload, seed=1, io=IO, machine=NVME)
    run_watched(toy, plan, WatchedDevice(EmulatedDevice(NVME)))
    with pytest.raises(RaceError, match="a read to the device"):
        run_watched(toy, plan, Hasty(EmulatedDevice(NVME)))
    real = KvikioEngine.submit

    def at_once(engine: KvikioEngine, *args: Any, **options: Any) -> Any:
        return real(engine, *args, **{**options, "after": None})

    monkeypatch.setattr(KvikioEngine, "submit", at_once)
    with pytest.raises(RaceError):
        run_watched(toy, plan, WatchedDevice(EmulatedDevice(NVME)))


# ---------------------------------------------------------------- a drive that fails


class FailingDrive:
    """A low-level read that fails once, at the ``at``-th from now."""

    def __init__(self) -> None:
        self.at = -1
        self._lock = threading.Lock()

    def count(self, *_: object) -> None:
        with self._lock:
            self.at -= 1
            if not self.at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int:
        self.count()
        return read_at(descriptor, into, offset)


@pytest.mark.parametrize("engine", ["reads", "straight", "staged"])
def test_a_drive_that_fails_in_the_middle_of_a_run(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = FailingDrive()
    facts = replace(HEALTHY, has_udev=engine == "straight")
    monkeypatch.setattr(probe, "look", lambda: facts)
    Kvikio(prefers_compat=engine == "staged", before=drive.count).install(monkeypatch)
    io = replace(IO, engine="reads" if engine == "reads" else "kvikio")
    toy, plan = streamed(tmp_path, io=io)
    failed = 0
    with toy.session(plan, reader=drive) as session:
        executor = toy.executor(session, plan)
        for at in (1, 2, 9, 33):
            drive.at = at
            for _ in range(4):
                x = torch.randn(4, 96)
                try:
                    found = executor.run(x)
                except StorageError as error:
                    failed += 1
                    said = str(error)
                    assert said.startswith("op '")
                    assert f"of {toy.path} for 'layers" in said
                    assert (
                        "Input/output error; check the drive and the file, then run again" in said
                    )
                    continue
                for ours, eager in zip(found, toy.eager(x), strict=True):
                    assert torch.equal(ours, eager)
            drive.at = -1
            x = torch.randn(4, 96)
            for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
                assert torch.equal(ours, eager)
    assert failed == 4


# ---------------------------------------------------------------- several drives


def on_drives(monkeypatch: pytest.MonkeyPatch, drives: dict[str, int]) -> None:
    def devices(files: SourceFiles) -> dict[str, int]:
        return {path: drives[Path(path).name] for path in files._files}

    monkeypatch.setattr(SourceFiles, "devices", property(devices))


def engine_on(
    paths: list[Path], io: IoSettings, *, reader: Reader = read_at, host: bool = False
) -> tuple[TransferEngine, Memory, Callable[[], None], SourceFiles]:
    """Return an engine on an emulated device, its arena, and what closes all of it."""
    files = SourceFiles([str(path) for path in paths])
    device = EmulatedDevice(FAST)
    if host:
        device.is_host = True
    arena = device.arena(1 << 20)
    pinned: list[Memory] = []
    engine = open_engine(device, arena, files, io, reader=reader, pinned=pinned)

    def close() -> None:
        engine.close()
        device.close()
        files.close()

    return engine, arena, close, files


@pytest.mark.parametrize("way", ["host", "reads", "kvikio"])
def test_a_drive_that_hangs_keeps_no_other_waiting(
    tmp_path: Path, way: str, direct: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("slow", "fast", "other")]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i + 1]) * (256 << 10))
    on_drives(monkeypatch, {"slow": 1, "fast": 2, "other": 3})
    gate = threading.Event()

    def reader(descriptor: int, into: memoryview, offset: int, /) -> int:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "slow":
            assert gate.wait(20)
        return read_at(descriptor, into, offset)

    direct.before = lambda path, offset: (
        None if not path.endswith("slow") or gate.wait(20) else pytest.fail("never opened")
    )
    io = replace(IO, engine="kvikio" if way == "kvikio" else "reads")
    engine, arena, close, files = engine_on(paths, io, reader=reader, host=way == "host")

    def submit(path: Path, address: int, key: int):  # type: ignore[no-untyped-def]
        extent = Extent(path=str(path), offset=0, size_bytes=128 << 10)
        source = WeightSource(name=path.name, dtype="uint8", shape=(128 << 10,), extents=(extent,))
        wanted = plan_landing(source, chunk_bytes=io.chunk_bytes, is_direct=files.is_direct)
        return engine.submit(wanted, address, key=key, link=LINK)

    stuck = [submit(paths[0], 0, key) for key in range(4)]
    for turn in range(3):
        for number, address in ((1, 256 << 10), (2, 512 << 10)):
            ticket = submit(paths[number], address, 100 + turn)
            ticket.wait()
            if ticket.event is not None:
                ticket.event.wait()
            assert (arena.bytes(address, address + (128 << 10)) == number + 1).all()
    assert not any(ticket.done for ticket in stuck)
    gate.set()
    for ticket in stuck:
        ticket.wait()
    close()
    if way == "kvikio":
        assert direct.settings["num_threads"] == 3 * share(IO, 3).num_threads
        assert direct.most_under_way[str(paths[0])] <= share(IO, 3).num_threads


def test_a_model_on_two_drives_equals_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, plan = streamed(tmp_path, io=replace(IO, engine="reads"))
    second = tmp_path / "second.safetensors"
    second.write_bytes(toy.path.read_bytes())
    for i, name in enumerate(sorted(toy.sources)):
        if i % 2:
            moved = tuple(replace(e, path=str(second)) for e in toy.sources[name].extents)
            toy.sources[name] = replace(toy.sources[name], extents=moved)
    on_drives(monkeypatch, {toy.path.name: 1, second.name: 2})
    threads: dict[str, set[int]] = {}

    def reader(descriptor: int, into: memoryview, offset: int, /) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        threads.setdefault(name, set()).add(threading.get_ident())
        return read_at(descriptor, into, offset)

    names = set(assert_runs(toy, plan, reader=reader)[LINK].split(" + "))
    assert names <= {"O_DIRECT", "page cache"}
    assert not threads[toy.path.name] & threads[second.name], "each drive has its own"


@pytest.mark.parametrize("num_drives", range(1, 9))
@pytest.mark.parametrize("num_threads", [1, 2, 4, 8])
def test_all_drives_together_leave_each_other_slots(num_threads: int, num_drives: int) -> None:
    io = IoSettings(num_threads=num_threads)
    own = share(io, num_drives).num_threads
    slots = io.staging_bytes // io.chunk_bytes
    assert own >= 1
    assert own * num_drives <= max(slots, num_drives)
    assert num_drives > 1 or own == num_threads


def test_partitions_of_a_drive_are_one_drive(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "nvme0n1"
    blocks = tmp_path / "block"
    blocks.mkdir()
    for number, part in (("259:1", "nvme0n1p1"), ("259:2", "nvme0n1p2")):
        (disk / part).mkdir(parents=True)
        (disk / part / "partition").write_text(number[-1])
        (blocks / number).symlink_to(disk / part)
    (blocks / "259:0").symlink_to(disk)
    (tmp_path / "devices" / "nvme1n1").mkdir()
    (blocks / "259:3").symlink_to(tmp_path / "devices" / "nvme1n1")
    found = [drive_of(os.makedev(259, i), system=blocks) for i in range(4)]
    assert found == [str(disk)] * 3 + [str(tmp_path / "devices" / "nvme1n1")]
    shared = os.makedev(0, 47)
    assert drive_of(shared, system=blocks) == str(shared), "a file system without a drive"
