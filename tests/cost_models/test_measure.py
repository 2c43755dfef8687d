"""Measuring this machine with a fake reader: ranges, limits, cleaning up, running out of space."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gascompile import serial
from gascompile.cost_models import measure_disk
from gascompile.cost_models.measure import measure_machine
from gascompile.cost_models.measure_disk import best_setting, probe_file
from gascompile.errors import StorageError
from gascompile.ir import IoSettings, Machine
from gascompile.units import MIB


@dataclass(frozen=True)
class Result:
    time_s: float
    path: str = "O_DIRECT"


class Drive:
    """A reader with a rate per setting that says what it was asked, and moves no bytes."""

    def __init__(self, bytes_per_s: float = 2e9, latency_s: float = 1e-4) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.asked: list[tuple[int, int, IoSettings]] = []

    def rate(self, io: IoSettings) -> float:
        return self.bytes_per_s

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        assert offset + size_bytes <= os.path.getsize(path)
        assert len(into) >= size_bytes
        self.asked.append((offset, size_bytes, io))
        return Result(self.latency_s if size_bytes == 4096 else size_bytes / self.rate(io))


class PeakedDrive(Drive):
    """Fastest with two threads and chunks of 4 MiB."""

    def rate(self, io: IoSettings) -> float:
        slower = (io.num_threads != 2) + (io.chunk_bytes != 4 * MIB)
        return self.bytes_per_s / (1 + slower)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, float, float, Path]:
    """Measure once: the machine, the seconds it took, the growth of the peak in bytes, the folder."""
    folder = tmp_path_factory.mktemp("measure")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    machine = measure_machine(folder=folder, read=Drive())
    time_s = time.perf_counter() - start
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return machine, time_s, grown, folder


def test_the_numbers_are_plausible(measured: tuple[Machine, float, float, Path]) -> None:
    machine = measured[0]
    assert set(machine.tiers) == {"cpu", "nvme"}
    assert machine.compute_tier == "cpu"
    assert machine.tiers["cpu"].size_bytes > 256 * MIB
    rates = {rate.dtype: rate.flops_per_s for rate in machine.rates}
    assert set(rates) == {"float32", "bfloat16", "float16", "float64"}
    assert 1e8 < rates["float32"] < 1e14
    assert 1e8 < rates["float64"] < 1e14
    (memory,) = machine.memory
    assert 1e8 < memory.bandwidth_bytes_per_s < 2e12
    assert 1e-8 < memory.op_overhead_s < 1e-3


def test_the_disk_is_what_the_reader_said(measured: tuple[Machine, float, float, Path]) -> None:
    link = measured[0].link("nvme->cpu")
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.latency_s == pytest.approx(1e-4)
    assert measured[0].link("cpu->nvme").bandwidth_bytes_per_s > 0


def test_every_number_says_where_it_comes_from(
    measured: tuple[Machine, float, float, Path],
) -> None:
    machine = measured[0]
    sources = [link.source for link in machine.links]
    sources += [rate.source for rate in machine.rates]
    sources += [rate.source for rate in machine.memory]
    sources += [tier.source for tier in machine.tiers.values()] + [machine.io.source]
    assert all(source.startswith("measured 2") for source in sources)
    assert "beside a one-row product" in machine.link("nvme->cpu").source
    assert "while the disk was read" in machine.memory[0].source


def test_it_is_quick_and_small(measured: tuple[Machine, float, float, Path]) -> None:
    _, time_s, grown_bytes, _ = measured
    # Four seconds on an idle machine; tests share theirs.
    assert time_s < 8
    assert grown_bytes < 200 * MIB


def test_the_file_is_gone(measured: tuple[Machine, float, float, Path]) -> None:
    assert os.listdir(measured[3]) == []


def test_it_survives_json(measured: tuple[Machine, float, float, Path]) -> None:
    machine = measured[0]
    assert serial.from_json(Machine, serial.to_json(machine)) == machine


def test_the_search_finds_the_best_setting_in_few_reads(tmp_path: Path) -> None:
    drive = PeakedDrive()
    with probe_file(tmp_path) as file:
        io, size_bytes = best_setting(file, drive, limit_s=5)
        assert size_bytes <= file.size_bytes
    assert (io.num_threads, io.chunk_bytes) == (2, 4 * MIB)
    assert len(drive.asked) == 7


def test_equal_settings_leave_the_processor_to_the_ops(tmp_path: Path) -> None:
    with probe_file(tmp_path) as file:
        io, _ = best_setting(file, Drive(), limit_s=5)
    assert io.num_threads == 1


def test_a_slow_drive_is_asked_for_less(tmp_path: Path) -> None:
    with probe_file(tmp_path) as file:
        _, slow = best_setting(file, Drive(5e7), limit_s=5)
        _, fast = best_setting(file, Drive(5e9), limit_s=5)
    assert (slow, fast) == (16 * MIB, 64 * MIB)


def test_the_file_is_noise(tmp_path: Path) -> None:
    with probe_file(tmp_path) as file, file.path.open("rb") as stream:
        pages = [stream.read(4096) for _ in range(1024)]
        stream.seek(16 * MIB)
        pages += [stream.read(4096) for _ in range(1024)]
    assert len(set(pages)) == len(pages)
    assert len(set(pages[0])) > 200


def test_the_file_goes_when_the_reader_fails(tmp_path: Path) -> None:
    def broken(
        path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        raise StorageError("the drive is gone")

    with pytest.raises(StorageError, match="the drive is gone"), probe_file(tmp_path) as file:
        file.latency_s(broken)
    assert os.listdir(tmp_path) == []


def test_a_file_left_by_a_killed_process_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".gascompile-probe-old", tmp_path / ".gascompile-probe-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    with probe_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == [new.name]


def test_little_space_takes_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_disk, "free_bytes", lambda folder: 100 * MIB)
    with probe_file(tmp_path) as file:
        assert file.path.stat().st_size == file.size_bytes == 48 * MIB


def test_no_space_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_disk, "free_bytes", lambda folder: 50 * MIB)
    with pytest.raises(StorageError, match=r"50\.00 MiB free"), probe_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"), probe_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_without_direct_io_the_file_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    with probe_file(tmp_path) as file:
        assert not file.direct
        assert file.path.stat().st_size == file.size_bytes


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"), probe_file(tmp_path / "nowhere"):
        pass
