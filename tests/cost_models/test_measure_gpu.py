"""Measuring a GPU: the rates of a scripted device, told by its stop watch alone, are found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gascompile.core import serial
from gascompile.core.checks.machine import check_machine
from gascompile.core.checks.machine_files import preset
from gascompile.core.machine import IoSettings, Machine
from gascompile.cost_models.measure.disk import probe_file
from gascompile.cost_models.measure.gpu import (
    EngineFigures,
    fastest,
    gpu_machine,
    measure_engine,
    measure_gpu,
)
from tests.drives import Result

MIB = 1 << 20
HOST = preset("cpu-nvme")
ROWS = (1, 16, 256)


@dataclass
class Scripted:
    """A device by formulas; every third repetition is disturbed and takes twice as long."""

    name: str = "Some GPU"
    total_bytes: int = 8 << 30
    width: int = 1024
    in_rate: float = 25e9
    out_rate: float = 20e9
    both_rate: float = 45e9
    latency_s: float = 12e-6
    memory_rate: float = 1e12
    call_s: float = 5e-6
    flops: Mapping[str, float] = field(
        default_factory=lambda: {
            "float32": 20e12,
            "bfloat16": 200e12,
            "float16": 210e12,
            "float64": 1e9,
        }
    )
    products: list[tuple[str, int]] = field(default_factory=list)
    _turn: int = 0

    def _measured(self, time_s: float) -> float:
        self._turn += 1
        return time_s * (1 if self._turn % 3 else 2)

    def copy_s(self, size_bytes: int, *, into: bool, out: bool) -> float:
        if into and out:
            return self._measured(self.latency_s + 2 * size_bytes / self.both_rate)
        rate = self.in_rate if into else self.out_rate
        return self._measured(self.latency_s + size_bytes / rate)

    def pass_s(self, size_bytes: int) -> float:
        return self._measured(1e-5 + 2 * size_bytes / self.memory_rate)

    def product_s(self, dtype: str, rows: int) -> float:
        self.products.append((dtype, rows))
        itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
        flops_s = 2 * rows * self.width**2 / self.flops[dtype]
        return self._measured(max(flops_s, itemsize * self.width**2 / self.memory_rate))

    def calls_s(self, num_calls: int) -> float:
        return self._measured(3e-5 + num_calls * self.call_s)

    def library_bytes(self) -> int:
        return 32 * MIB


def test_rates_and_fixed_costs_are_told_apart() -> None:
    device = Scripted()
    found = measure_gpu(device, rows=ROWS, num_repeats=10)
    assert found.into.bytes_per_s == pytest.approx(device.in_rate, rel=1e-6)
    assert found.out.bytes_per_s == pytest.approx(device.out_rate, rel=1e-6)
    for direction in (found.into, found.out):
        assert direction.latency_s == pytest.approx(device.latency_s, rel=1e-6)
    assert found.both_bytes_per_s == pytest.approx(device.both_rate, rel=0.01)
    assert found.memory_bytes_per_s == pytest.approx(device.memory_rate, rel=1e-6)
    assert found.op_overhead_s == pytest.approx(device.call_s, rel=1e-6)
    assert (found.name, found.total_bytes, found.library_bytes) == ("Some GPU", 8 << 30, 32 * MIB)


def test_products_are_bound_by_memory_and_then_by_arithmetic() -> None:
    device = Scripted()
    points = measure_gpu(device, rows=ROWS, num_repeats=10).points
    few, _, many = points["bfloat16"]
    assert few.flops_per_s == pytest.approx(device.memory_rate, rel=1e-6)  # 2 FLOPs for 2 bytes
    assert many.flops_per_s == pytest.approx(device.flops["bfloat16"], rel=1e-6)
    assert [p.flops_per_byte for p in points["float32"]] == sorted(
        p.flops_per_byte for p in points["float32"]
    )


def test_no_larger_product_is_tried_after_one_that_takes_long() -> None:
    device = Scripted()
    points = measure_gpu(device, rows=ROWS, num_repeats=10).points
    assert 2 * 256 * 1024**2 / 1e9 > 0.1 > 2 * 16 * 1024**2 / 1e9
    assert len(points["float64"]) == 3
    device = Scripted(flops={**device.flops, "float64": 1e8})
    assert len(measure_gpu(device, rows=ROWS, num_repeats=10).points["float64"]) == 2
    assert ("float64", 256) not in device.products


def engine(name: str, bytes_per_s: float) -> EngineFigures:
    return EngineFigures(
        io=IoSettings(num_threads=3, engine=name),
        bytes_per_s=bytes_per_s,
        latency_s=1e-4,
        path="GPUDirect Storage" if name == "kvikio" else "O_DIRECT",
    )


def machine(*engines: EngineFigures, device: Scripted | None = None) -> Machine:
    figures = measure_gpu(device or Scripted(), rows=ROWS, num_repeats=10)
    return gpu_machine(HOST, figures, engines or (engine("reads", 6e9),), effort="in a test")


def test_the_machine_has_three_tiers_and_every_number_a_source() -> None:
    made = machine()
    check_machine(made)
    assert serial.from_json(Machine, serial.to_json(made)) == made
    assert made.compute_tier == "gpu"
    assert made.compute_backend == "cuda"
    assert made.name == f"{HOST.name}, Some GPU"
    assert set(made.tiers) == {"gpu", "cpu", "nvme"}
    assert {link.name for link in made.links} == {
        "nvme->gpu", "cpu->gpu", "gpu->cpu", "nvme->cpu", "cpu->nvme",
    }  # fmt: skip
    assert made.library_bytes("gpu") == 32 * MIB
    assert made.library_bytes("cpu") == 0
    sources = [link.source for link in made.links if "gpu" in link.name]
    sources += [pipe.source for pipe in made.pipes] + [made.io.source, made.tiers["gpu"].source]
    sources += [rate.source for rate in made.rates if rate.device == "gpu"]
    sources += [rate.source for rate in made.memory if rate.device == "gpu"]
    for source in sources:
        assert source.startswith("measured ")
        assert " in a test: " in source


def test_what_shares_a_wire_shares_its_pipe() -> None:
    made = machine()
    sharing = {
        pipe.name: {link.name for link in made.links if pipe.name in link.shared}
        for pipe in made.pipes
    }
    assert sharing == {"nvme-read": {"nvme->gpu", "nvme->cpu"}, "gpu-in": {"nvme->gpu", "cpu->gpu"}}


def test_directions_that_slow_each_other_down_share_a_bus() -> None:
    made = machine(device=Scripted(both_rate=30e9))
    (bus,) = (pipe for pipe in made.pipes if pipe.name == "gpu-bus")
    assert bus.bandwidth_bytes_per_s == pytest.approx(30e9, rel=0.01)
    shared = {link.name for link in made.links if "gpu-bus" in link.shared}
    assert shared == {"nvme->gpu", "cpu->gpu", "gpu->cpu"}


def test_the_faster_engine_reads() -> None:
    reads, direct = engine("reads", 6e9), engine("kvikio", 12e9)
    assert fastest([reads, direct]) is direct
    assert fastest([reads, replace(direct, bytes_per_s=6.2e9)]) is reads
    assert fastest([direct]) is direct
    made = machine(reads, direct)
    assert made.io.engine == "kvikio"
    link = made.link("nvme->gpu")
    assert link.bandwidth_bytes_per_s == 12e9
    # Which one was chosen, by which path, and what the other reached.
    assert "kvikio by GPUDirect Storage 12.00 GB/s, reads by O_DIRECT 6.00 GB/s" in link.source


def test_an_engine_is_measured_with_the_settings_that_suit_it(tmp_path: Path) -> None:
    def read(
        path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        rate = 1e9 * min(io.num_threads, 2)
        return Result(1e-4 + size_bytes / rate, "GPUDirect Storage")

    with probe_file(tmp_path, most_bytes=64 * MIB) as file:
        found = measure_engine("kvikio", file, read, limit_s=0.2)
    assert found.io.engine == "kvikio"
    assert found.io.num_threads == 2
    assert found.bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert found.latency_s == pytest.approx(1e-4, rel=0.05)
    assert found.path == "GPUDirect Storage"
