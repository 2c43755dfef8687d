"""What ops of a step take on this machine's GPU is measured there, and reserved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gascompile.core.budget import Budget
from gascompile.core.workload import Workload
from gascompile.machines import device_calls, op_times
from gascompile.machines.resolve import preset
from gascompile.training.capture.joint import capture_joint
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.planning import step_costs
from gascompile.training.planning.step_costs import costed_workload
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.planning.step_workload import step_workload
from tests.cost_models.counted_device import CountedDevice
from tests.training.trials import adamw

GPU = preset("h100-gen5")
MM = torch.ops.aten.mm.default
MIB = 1 << 20


def _program() -> StepProgram:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    joint = capture_joint(model, lambda m, b: m(b).square().mean(), torch.randn(8, 64))
    names = {id(tensor): name for name, tensor in joint.tensors.items()}
    rules = Rules(adamw(model), names, list(joint.gradients))
    return step_program(joint, rules, name="step", options=StepOptions())


def _costed(program: StepProgram, folder: Path) -> Workload:
    budget = Budget(gpu=1 << 30)
    return costed_workload(program, GPU, budget, cache_dir=folder, pages=None)


def _large(workload: Workload) -> set[str]:
    return {op.name for op in workload.ops if op.workspace_bytes >= 5 * MIB}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedDevice]:
    """Let this machine have a GPU whose products take 5 MiB."""
    device = CountedDevice(scratch={MM: 5 * MIB})
    monkeypatch.setattr(op_times, "usable_gpu", lambda: "a GPU")
    monkeypatch.setattr(op_times, "this_machine_name", lambda: GPU.name)
    monkeypatch.setattr(device_calls, "OpsOnDevice", device.ops)
    with device:
        yield device


def test_scratch_of_the_device_is_reserved_and_measured_once(
    tmp_path: Path, device: CountedDevice
) -> None:
    program = _program()
    assert not _large(step_workload(program, GPU))
    first = _costed(program, tmp_path)
    calls = device.calls[MM]
    assert calls
    assert _costed(program, tmp_path) == first
    assert device.calls[MM] == calls
    products = {node.name for node in program.program.op_nodes() if node.target is MM}
    assert products
    assert _large(first) == products


def test_another_gpu_goes_by_formulas(tmp_path: Path) -> None:
    program = _program()
    assert _costed(program, tmp_path) == step_workload(program, GPU)


def test_seconds_of_the_device_are_measured_once(
    tmp_path: Path, device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program()
    untimed = _costed(program, tmp_path)
    before = device.calls[MM]
    monkeypatch.setattr(step_costs, "_WORTH_S", 0.0)
    timed = _costed(program, tmp_path)
    calls = device.calls[MM]
    assert calls > before
    assert _costed(program, tmp_path) == timed
    assert device.calls[MM] == calls
    pairs = [(a, b) for a, b in zip(untimed.ops, timed.ops, strict=True) if a.name in _large(timed)]
    assert all(a.time_s != b.time_s for a, b in pairs)
    assert [a.workspace_bytes for a in untimed.ops] == [b.workspace_bytes for b in timed.ops]
