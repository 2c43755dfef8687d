"""Scratch memory of ops on this machine's GPU: measured there once, remembered apart from the processor's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.core.program import Program
from gascompile.core.remembered import remembered
from gascompile.core.workload import Workload
from gascompile.cost_models.measure.ops_on_device import OpsOnDevice
from gascompile.machines import device_calls, op_memory, op_times
from gascompile.machines.op_memory import annotate_memory
from gascompile.machines.resolve import preset, this_machine_name
from gascompile.passes.graph.annotate import annotate
from tests.cost_models.counted_device import CountedDevice

GPU = preset("h100-gen5")
LINEAR = torch.ops.aten.linear.default
MIB = 1 << 20


class Model(nn.Module):
    """A product, what follows it, and an op that makes a tensor on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).relu() + torch.arange(64)
        return found


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Model().eval(), (torch.randn(2, 64),), {}).program


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedDevice]:
    """Let this machine have a GPU whose products take a MiB."""
    device = CountedDevice(scratch={torch.ops.aten.addmm.default: MIB, LINEAR: MIB})
    monkeypatch.setattr(op_times, "usable_gpu", lambda: "a GPU")
    monkeypatch.setattr(op_times, "this_machine_name", lambda: GPU.name)
    monkeypatch.setattr(device_calls, "OpsOnDevice", device.ops)
    with device:
        yield device


def workload(program: Program, folder: Path, machine: Machine = GPU) -> Workload:
    return annotate_memory(program, machine, CompileConfig(cache_dir=folder)).workload


def num_products(device: CountedDevice) -> int:
    return sum(count for op, count in device.calls.items() if op is LINEAR or "addmm" in str(op))


def scratch_bytes(found: Workload) -> int:
    return max(op.workspace_bytes for op in found.ops)


def test_scratch_of_the_device_is_reserved_and_remembered(
    program: Program, device: CountedDevice, tmp_path: Path
) -> None:
    assert scratch_bytes(workload(program, tmp_path)) >= MIB
    calls = num_products(device)
    assert calls > 0
    assert scratch_bytes(workload(program, tmp_path)) >= MIB
    assert num_products(device) == calls, "known from the first time"
    (kept,) = tmp_path.glob("op_memory.json")
    measured = json.loads(kept.read_text())["measured"]
    assert measured
    assert all(f"on {GPU.name}" in kind and "threads=" not in kind for kind in measured)
    assert any("arange" in kind for kind in measured)


def test_what_is_no_file_in_the_place_of_figures_is_not_read(
    program: Program,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipe would be waited for, and a device may never end."""
    machine = preset("cpu-nvme")
    monkeypatch.setattr(op_times, "this_machine_name", lambda: machine.name)
    os.mkfifo(tmp_path / "op_memory.json")
    found = workload(program, tmp_path, machine)
    assert "not a regular file" in caplog.text
    os.mkfifo(tmp_path / "seconds.json")
    assert remembered(tmp_path / "seconds.json", "a format", "seconds", len) is None
    assert found == workload(program, tmp_path / "other", machine)


def test_formulas_do_where_the_device_refuses(
    program: Program, device: CountedDevice, tmp_path: Path
) -> None:
    device.errors = {LINEAR: NotImplementedError, torch.ops.aten.addmm.default: RuntimeError}
    found = workload(program, tmp_path)
    expected = annotate(program, GPU).workload
    assert [op.workspace_bytes for op in found.ops] == [op.workspace_bytes for op in expected.ops]


def test_another_gpu_goes_by_formulas(
    program: Program, device: CountedDevice, tmp_path: Path
) -> None:
    elsewhere = replace(GPU, name="another one")
    found = workload(program, tmp_path, elsewhere)
    assert found == annotate(program, elsewhere).workload
    assert not list(tmp_path.iterdir())
    assert num_products(device) == 0


def test_without_a_usable_gpu_formulas_do(
    program: Program, device: CountedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_times, "usable_gpu", lambda: "")
    assert workload(program, tmp_path) == annotate(program, GPU).workload


def test_what_is_known_of_the_device_is_none_of_the_processor(
    program: Program, device: CountedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload(program, tmp_path)
    host = replace(preset("cpu-nvme"), name="the host")
    monkeypatch.setattr(op_times, "this_machine_name", lambda: host.name)
    assert scratch_bytes(workload(program, tmp_path, host)) < MIB
    monkeypatch.setattr(op_times, "this_machine_name", lambda: GPU.name)
    calls = num_products(device)
    assert scratch_bytes(workload(program, tmp_path)) >= MIB
    assert num_products(device) == calls


def test_measuring_ends_in_time(
    program: Program, device: CountedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_memory, "_DEVICE_LIMIT_S", -1.0)
    assert workload(program, tmp_path) == annotate(program, GPU).workload


def test_seconds_of_the_device_are_remembered(
    program: Program, device: CountedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_times, "_WORTH_S", 0.0)
    costs = annotate(program, GPU).workload
    first = op_times.measured_times(program, costs, GPU, tmp_path)
    calls = num_products(device)
    assert calls > 3
    assert op_times.measured_times(program, costs, GPU, tmp_path) == first
    assert num_products(device) == calls
    (called_s,) = (rate.op_overhead_s for rate in GPU.memory if rate.device == "gpu")
    assert set(first) == {op.name for op in costs.ops}
    assert all(time_s >= called_s > 0 for time_s in first.values())


@pytest.mark.gpu
def test_what_a_gpu_takes_is_measured_once(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(GPU, name=this_machine_name())
    first = workload(program, tmp_path, machine)
    kept = (tmp_path / "op_memory.json").read_text()
    assert "linear" in kept or "addmm" in kept

    def refuse(*_: object) -> int:
        raise AssertionError("known from the first time")

    monkeypatch.setattr(OpsOnDevice, "workspace_bytes", refuse)
    assert workload(program, tmp_path, machine) == first
    assert (tmp_path / "op_memory.json").read_text() == kept
