"""Measuring this machine with a fake reader: ranges, limits, cleaning up, running out of space."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.core import serial
from gascompile.core.checks.machine import check_machine
from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings, Machine
from gascompile.core.sizes import MIB
from gascompile.cost_models.measure import disk as measure_disk
from gascompile.cost_models.measure.compute import ROWS, product_point, typical
from gascompile.cost_models.measure.disk import best_setting, probe_file
from gascompile.cost_models.measure.machine import THOROUGH, measure_machine
from tests.drives import Result


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
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, int, Path]:
    """Measure once: the machine, the growth of the peak in bytes, the folder."""
    folder = tmp_path_factory.mktemp("measure")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    machine = measure_machine(folder=folder, read=Drive())
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return machine, grown, folder


def test_the_numbers_are_plausible(measured: tuple[Machine, int, Path]) -> None:
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


def test_the_disk_is_what_the_reader_said(measured: tuple[Machine, int, Path]) -> None:
    link = measured[0].link("nvme->cpu")
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.latency_s == pytest.approx(1e-4)
    assert measured[0].link("cpu->nvme").bandwidth_bytes_per_s > 0


def test_every_number_says_where_it_comes_from(
    measured: tuple[Machine, int, Path],
) -> None:
    machine = measured[0]
    sources = [link.source for link in machine.links]
    sources += [rate.source for rate in machine.rates]
    sources += [rate.source for rate in machine.memory]
    sources += [tier.source for tier in machine.tiers.values()] + [machine.io.source]
    assert all(source.startswith("measured 2") for source in sources)
    assert "beside a one-row product" in machine.link("nvme->cpu").source
    assert "while the disk was read" in machine.memory[0].source


def test_it_is_small(measured: tuple[Machine, int, Path]) -> None:
    # 96 MiB of weights, 64 and 16 of noise, and the libraries that compute.
    assert measured[1] < 256 * MIB


class CachingDrive(Drive):
    """Three times as fast with bytes that it has served before."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.known: dict[str, int] = {}

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        known = offset + size_bytes <= self.known.get(path, 0)
        self.known[path] = max(self.known.get(path, 0), offset + size_bytes)
        if size_bytes == 4096:
            self.known[path] = 0  # the latency is taken from all over the file
        return Result(size_bytes / (3e9 if known else 1e9))


def test_the_link_has_the_rate_of_later_reads(tmp_path: Path) -> None:
    link = measure_machine(folder=tmp_path, read=CachingDrive()).link("nvme->cpu")
    assert link.bandwidth_bytes_per_s == pytest.approx(3e9)
    assert "1.00 GB/s the first time" in link.source


def test_a_measurement_says_how_long_it_took(tmp_path: Path) -> None:
    effort = replace(THOROUGH, num_calls=1, matrix_limit_s=0.1, disk_limit_s=0.1)
    stages: list[str] = []
    thorough = measure_machine(folder=tmp_path, read=Drive(), effort=effort, stage=stages.append)
    assert all("thoroughly:" in rate.source for rate in thorough.rates)
    assert stages == ["processor", "disk", "disk and processor at once"]
    points = {rate.dtype: len(rate.points) for rate in thorough.rates}
    assert points["float32"] == len(ROWS)


def test_points_grow_in_intensity(measured: tuple[Machine, int, Path]) -> None:
    for rate in measured[0].rates:
        intensities = [point.flops_per_byte for point in rate.points]
        assert intensities == sorted(intensities)
        assert rate.flops_per_s == max(point.flops_per_s for point in rate.points)
    assert "in short:" in measured[0].rates[0].source


def test_a_measured_machine_can_be_planned_for(
    measured: tuple[Machine, int, Path],
) -> None:
    check_machine(measured[0])


def test_the_point_of_a_product_by_hand() -> None:
    # 2 rows x 100 x 100 are 40,000 FLOPs; 4 bytes x (10,000 weights + 200 in + 200 out) are 41,600.
    point = product_point(rows=2, itemsize=4, time_s=1e-3, width=100)
    assert point.flops_per_byte == pytest.approx(40_000 / 41_600)
    assert point.flops_per_s == pytest.approx(4e7)


def test_a_fifth_of_the_times_is_faster_than_the_typical_one() -> None:
    assert typical([9.0, 1.0, 2.0, 3.0, 4.0]) == 2.0
    assert typical([5.0]) == 5.0
    assert typical([float(i) for i in range(100, 0, -1)]) == 21.0


def test_the_file_is_gone(measured: tuple[Machine, int, Path]) -> None:
    assert os.listdir(measured[2]) == []


def test_it_survives_json(measured: tuple[Machine, int, Path]) -> None:
    machine = measured[0]
    assert serial.from_json(Machine, serial.to_json(machine)) == machine


def test_the_search_finds_the_best_setting_in_few_reads(tmp_path: Path) -> None:
    drive = PeakedDrive()
    with probe_file(tmp_path) as file:
        io, size_bytes, rates = best_setting(file, drive, limit_s=5)
        assert size_bytes <= file.size_bytes
    assert (io.num_threads, io.chunk_bytes) == (2, 4 * MIB)
    assert len(rates) == 6
    assert max(rates, key=lambda setting: rates[setting]) == io
    # One read to find the size, one that makes the bytes known, one per setting.
    assert len(drive.asked) == 8
    assert {offset for offset, _, _ in drive.asked[1:]} == {0}


def test_equal_settings_leave_the_processor_to_the_ops(tmp_path: Path) -> None:
    with probe_file(tmp_path) as file:
        io, _, _ = best_setting(file, Drive(), limit_s=5)
    assert io.num_threads == 1


def test_a_slow_drive_is_asked_for_less(tmp_path: Path) -> None:
    with probe_file(tmp_path) as file:
        _, slow, _ = best_setting(file, Drive(5e7), limit_s=5)
        _, fast, _ = best_setting(file, Drive(5e9), limit_s=5)
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
