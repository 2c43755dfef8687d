"""Counters of energy: folders as the kernel shows them, a stand-in for NVML, and no figure where none is known."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from gascompile.runtime.devices import energy_counters as module
from gascompile.runtime.devices.energy_counters import (
    Counters,
    EnergyCounter,
    gpu_counters,
    package_counters,
)
from tests.runtime.toys import make_plan, mlp

RANGE_UJ = 262_143_328_850


def zone(folder: Path, name: str, title: str, joules: float) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{title}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (path / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return path


def spend(path: Path, joules: float) -> None:
    (path / "energy_uj").write_text(f"{int(joules * 1e6)}\n")


def test_packages_are_added_and_zones_that_overlap_are_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 200)
    zone(tmp_path, "intel-rapl:2", "psys", 1000)
    zone(tmp_path, "intel-rapl:0:0", "dram", 50)
    counters = package_counters(tmp_path)
    assert counters.source == "RAPL package-0 + RAPL package-1"
    before_j = counters.read_j()
    assert before_j is not None
    assert list(before_j) == [100, 200]
    spend(first, 103)
    spend(second, 204.5)
    assert counters.taken_j(before_j, 1.0) == pytest.approx(7.5)


def test_a_counter_that_begins_anew(tmp_path: Path) -> None:
    end_j = RANGE_UJ * 1e-6
    path = zone(tmp_path, "intel-rapl:0", "package-0", end_j - 2)
    counters = package_counters(tmp_path)
    before_j = counters.read_j()
    spend(path, 3)
    assert counters.taken_j(before_j, 1.0) == pytest.approx(5)
    # In so long a run it may have done so twice.
    assert counters.taken_j(before_j, end_j / 1000 + 1) is None


def test_what_is_not_known_is_not_zero(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 10)
    counters = package_counters(tmp_path)
    before_j = counters.read_j()
    assert counters.taken_j(before_j, 1e-6) is None
    spend(path, 11)
    (path / "energy_uj").write_text("nonsense")
    assert counters.taken_j(before_j, 1.0) is None
    assert counters.read_j() is None
    (path / "name").unlink()
    broken = package_counters(tmp_path)
    assert not broken.of
    assert "cannot be read" in broken.reason
    none = package_counters(tmp_path / "nowhere")
    assert none.read_j() is None
    assert none.taken_j(None, 1.0) is None
    assert "virtual machine hides it" in none.reason


class NvmlError(Exception):
    """As ``pynvml`` has it."""


def test_the_gpu_that_torch_means(monkeypatch: pytest.MonkeyPatch) -> None:
    spent_mj = {"GPU-b": 5_000}
    nvml = types.ModuleType("pynvml")
    handles = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": lambda name: name}
    for name, value in handles.items():
        setattr(nvml, name, value)

    def total(handle: str) -> int:
        if handle not in spent_mj:
            raise NvmlError("not supported")
        return spent_mj[handle]

    nvml.nvmlDeviceGetTotalEnergyConsumption = total  # type: ignore[attr-defined]
    nvml.NVMLError = NvmlError  # type: ignore[attr-defined]
    uuids = {"cuda:0": "a", "cuda:1": "b"}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(uuid=uuids[str(device)]),
    )
    counters = gpu_counters(torch.device("cuda:1"), nvml)
    before_j = counters.read_j()
    spent_mj["GPU-b"] += 2_500
    assert counters.taken_j(before_j, 100.0) == pytest.approx(2.5)
    old = gpu_counters(torch.device("cuda:0"), nvml)
    assert not old.of
    assert "not supported" in old.reason


def test_a_run_reports_what_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter(range(0, 100, 4))
    counter = EnergyCounter(name="a counter", range_j=1e9, read_j=lambda: float(next(spent)))
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    for counters in (Counters(of=(counter,)), Counters(reason="none")):
        monkeypatch.setattr(
            "gascompile.runtime.run.executor.energy_counters", lambda _device, c=counters: c
        )
        with toy.session(plan) as session:
            executor = toy.executor(session, plan)
            executor.run(torch.randn(4, 96))
            report = executor.last_run
            assert report is not None
            if counters.of:
                assert report.energy is not None
                assert (report.joules, report.energy.source) == (4.0, "a counter")
            else:
                assert report.joules is None


def test_counters_are_looked_for_once() -> None:
    device = torch.device("cpu")
    assert module.energy_counters(device) is module.energy_counters(device)
