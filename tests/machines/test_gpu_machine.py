"""This machine with its GPU, by stand-ins: which engine is chosen on which drive, and what is said of the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gascompile.core.checks.machine import check_machine
from gascompile.core.errors import DeviceError, FormatError
from gascompile.core.machine import IoSettings, Machine
from gascompile.cost_models.measure.disk import ProbeReader
from gascompile.cost_models.measure.gpu import EngineFigures, least_bytes
from gascompile.cost_models.measure.machine import SHORT
from gascompile.machines import gpu as gpu_machine
from gascompile.machines.gpu import gpu_readers, measured, with_gpu
from gascompile.machines.resolve import preset
from gascompile.runtime.devices.probe import GpuFacts
from gascompile.runtime.transfer.kvikio_path import GPU_DIRECT, KVIKIO_COMPAT
from tests.cost_models.test_measure_gpu import Scripted
from tests.drives import Result
from tests.machines.fake_cuda import FakeCuda
from tests.runtime.fake_kvikio import Kvikio, uninstall
from tests.runtime.test_probe import BROKEN, HEALTHY

HOST = preset("cpu-nvme")
EFFORT = replace(SHORT, file_bytes=64 << 20, disk_limit_s=0.1, num_calls=2)


def engine(bytes_per_s: float, latency_s: float, taken: str, threads: int = 2) -> ProbeReader:
    """Return a reader by a formula; more threads than ``threads`` do not help."""

    def read(
        path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        assert Path(path).stat().st_size >= offset + size_bytes
        rate = bytes_per_s * min(io.num_threads, threads) / threads
        return Result(latency_s + size_bytes / rate, taken)

    return read


def made(folder: Path, readers: Mapping[str, ProbeReader], facts: GpuFacts = HEALTHY) -> Machine:
    found = measured(HOST, folder, EFFORT, Scripted(), readers, facts=facts)
    check_machine(found)
    return found


def test_kvikio_where_it_is_faster_and_from_which_size(tmp_path: Path) -> None:
    readers = {
        "reads": engine(4e9, 1e-4, "O_DIRECT"),
        "kvikio": engine(8e9, 3e-4, GPU_DIRECT, threads=4),
    }
    machine = made(tmp_path, readers)
    io = machine.io
    assert (io.engine, io.path, io.num_threads) == ("kvikio", GPU_DIRECT, 4)
    assert machine.link("nvme->gpu").bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.1)
    # Below that size the start costs more than the rate gains: 200 us against 1/8 ns a byte.
    assert io.least_bytes == pytest.approx(2e-4 / (1 / 4e9 - 1 / 8e9), rel=0.15)


def test_aligned_reads_where_they_are_as_good(tmp_path: Path) -> None:
    readers = {
        "reads": engine(4e9, 1e-4, "O_DIRECT"),
        "kvikio": engine(4.1e9, 1e-4, f"{KVIKIO_COMPAT} (no /run/udev)"),
    }
    io = made(tmp_path, readers).io
    assert (io.engine, io.path, io.least_bytes) == ("reads", "O_DIRECT", 0)


def test_each_file_system_has_its_own_answer(tmp_path: Path) -> None:
    drives = {"fast": 9e9, "network": 1e9}
    chosen = {}
    for name, rate in drives.items():
        folder = tmp_path / name
        folder.mkdir()
        readers = {
            "reads": engine(3e9, 1e-4, "O_DIRECT"),
            "kvikio": engine(rate, 1e-4, GPU_DIRECT),
        }
        chosen[name] = made(folder, readers).io.engine
        assert not list(folder.iterdir()), "the file that was measured is gone"
    assert chosen == {"fast": "kvikio", "network": "reads"}


def test_sizes_by_the_lines_of_two_engines() -> None:
    def figures(name: str, rate: float, latency_s: float) -> EngineFigures:
        io = IoSettings(engine=name)
        return EngineFigures(io=io, bytes_per_s=rate, latency_s=latency_s, path="")

    reads, direct = figures("reads", 2e9, 1e-4), figures("kvikio", 6e9, 5e-4)
    size = least_bytes(direct, [reads, direct])

    def time_s(of: EngineFigures, size_bytes: float) -> float:
        return float(of.latency_s + size_bytes / of.bytes_per_s)

    assert time_s(direct, size) <= time_s(reads, size)
    assert time_s(direct, size - 2) > time_s(reads, size - 2)
    assert least_bytes(figures("kvikio", 6e9, 1e-5), [reads]) == 0
    assert least_bytes(reads, [reads, direct]) == 0
    assert least_bytes(direct, [direct]) == 0


def test_a_size_that_is_none_is_refused() -> None:
    wrong = replace(HOST, io=replace(HOST.io, least_bytes=-1))
    with pytest.raises(FormatError, match=r"\.io\.least_bytes.*give zero or more"):
        check_machine(wrong)


def host_read(
    path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
) -> Result:
    with Path(path).open("rb") as stream:
        stream.seek(offset)
        into[:size_bytes] = stream.read(size_bytes)
    return Result(1e-3, "page cache")


@pytest.mark.parametrize("is_direct", [True, False])
def test_kvikio_is_measured_by_the_path_that_runs_take(
    tmp_path: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Kvikio(prefers_compat=not is_direct).install(monkeypatch)
    facts = replace(HEALTHY, has_udev=is_direct)
    readers = gpu_readers(host_read, facts, cuda=FakeCuda(), device="cpu")
    assert set(readers) == {"reads", "kvikio"}
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    io = IoSettings(num_threads=2, chunk_bytes=4096)
    memory = memoryview(bytearray(8192))
    found = readers["kvikio"](str(path), offset=4096, size_bytes=4096, into=memory, io=io)
    assert found.path.startswith(GPU_DIRECT if is_direct else KVIKIO_COMPAT)
    assert module.to_host == [not is_direct], "without GDS into pinned memory of our own"
    assert readers["reads"](str(path), offset=0, size_bytes=10, into=memory, io=io).path == (
        "page cache"
    )


def test_without_kvikio_reads_are_measured_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uninstall(monkeypatch)
    with caplog.at_level(logging.WARNING):
        readers = gpu_readers(host_read, HEALTHY, cuda=FakeCuda(), device="cpu")
    assert set(readers) == {"reads"}
    assert "pip install 'gascompile[gpu]'" in caplog.text


def test_what_is_missing_is_said_with_the_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = replace(HEALTHY, nvidia_fs="", has_udev=False)
    with caplog.at_level(logging.WARNING):
        made(tmp_path, {"reads": engine(4e9, 1e-4, "O_DIRECT")}, facts)
    for text in ("modprobe nvidia-fs", "--volume /run/udev", "(measured: reads 4.0 GB/s)"):
        assert text in caplog.text


def test_a_machine_without_a_usable_gpu_is_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_machine, "look", lambda: BROKEN)
    assert with_gpu(HOST, tmp_path, host_read, EFFORT) is HOST


def test_a_gpu_whose_memory_is_taken_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_machine, "look", lambda: HEALTHY)
    monkeypatch.setattr("gascompile.cost_models.measure.cuda_timer.CudaTimer", full)
    with pytest.raises(DeviceError, match=r"stop what nvidia-smi lists") as caught:
        with_gpu(HOST, tmp_path, host_read, EFFORT)
    assert caught.value.cause == "device memory"
