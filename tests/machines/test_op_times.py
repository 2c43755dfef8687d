"""Measured seconds of ops: remembered beside the machine, for this machine and programs worth it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.core.machine import Machine
from gascompile.core.program import Program
from gascompile.core.workload import Workload
from gascompile.cost_models.measure import ops as measure_ops
from gascompile.machines import op_times
from gascompile.machines.emulated import emulated_machine, emulated_name
from gascompile.machines.resolve import (
    host_name,
    op_times_path,
    preset,
    remember_machine,
    this_machine_name,
)
from gascompile.passes.graph.annotate import annotate
from gascompile.passes.graph.retime import retime

THIS = replace(preset("cpu-nvme"), name=this_machine_name())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Answer every measurement with 7 s; return what was asked."""
    asked: list[list[str]] = []

    def measure(
        nodes: list[torch.fx.Node], program: Program, *, limit_s: float, in_place_of: object
    ) -> Mapping[str, float]:
        names = {measure_ops.signature(node, program) for node in nodes}
        asked.append(sorted(name for name in names if name))
        return dict.fromkeys(asked[-1], 7.0)

    monkeypatch.setattr(op_times, "measure_ops", measure)
    monkeypatch.setattr(op_times, "_WORTH_S", 0.0)
    return asked


def problem(machine: Machine = THIS, width: int = 64) -> tuple[Program, Workload]:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()
    program = capture(model, (torch.randn(2, width),), {}).program
    return program, annotate(program, machine).workload


def test_ops_are_measured_once_and_remembered(tmp_path: Path, measured: list[list[str]]) -> None:
    program, workload = problem()
    first = op_times.measured_times(program, workload, THIS, tmp_path)
    second = op_times.measured_times(program, workload, THIS, tmp_path)
    assert set(first) == set(second) == {op.name for op in workload.ops}
    assert len(measured) == 1
    timed = retime(workload, first, device="cpu")
    assert all(op.time_s["cpu"] >= 7.0 for op in timed.ops)


def test_a_new_calibration_forgets_them(tmp_path: Path, measured: list[list[str]]) -> None:
    program, workload = problem()
    op_times.measured_times(program, workload, THIS, tmp_path)
    remember_machine(THIS, tmp_path)
    op_times.measured_times(program, workload, THIS, tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"seconds": {"a": "b"}}'])
def test_a_damaged_file_is_measured_again(
    text: str, tmp_path: Path, measured: list[list[str]]
) -> None:
    program, workload = problem()
    op_times.measured_times(program, workload, THIS, tmp_path)
    op_times_path(tmp_path).write_text(text)
    assert op_times.measured_times(program, workload, THIS, tmp_path)
    assert len(measured) == 2


def test_a_full_disk_costs_no_plan(
    tmp_path: Path,
    measured: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, data: object) -> None:
        raise StorageError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr(serial, "write_atomic", full)
    program, workload = problem()
    for _ in range(2):
        times_s = op_times.measured_times(program, workload, THIS, tmp_path)
        assert set(times_s) == {op.name for op in workload.ops}
    assert len(measured) == 2
    assert caplog.text.count("the disk is full") == 2


def test_another_machine_goes_by_its_rates(tmp_path: Path, measured: list[list[str]]) -> None:
    machine = preset("cpu-nvme")
    program, workload = problem(machine)
    assert op_times.measured_times(program, workload, machine, tmp_path) == {}
    assert measured == []


def test_the_emulated_accelerator_computes_on_this_processor(
    tmp_path: Path, measured: list[list[str]]
) -> None:
    machine = emulated_machine(replace(THIS, name=host_name()))
    program, workload = problem(machine)
    times_s = op_times.measured_times(program, workload, machine, tmp_path)
    assert set(times_s) == {op.name for op in workload.ops}
    elsewhere = replace(machine, name=emulated_name("another host"))
    assert op_times.measured_times(program, workload, elsewhere, tmp_path) == {}
    assert len(measured) == 1


def test_a_short_program_is_not_measured(
    tmp_path: Path, measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_times, "_WORTH_S", 1.0)
    program, workload = problem()
    assert op_times.measured_times(program, workload, THIS, tmp_path) == {}
    assert measured == []


def test_times_with_other_products_are_remembered_apart(
    tmp_path: Path, measured: list[list[str]]
) -> None:
    program, workload = problem()
    for onednn in (False, True, True, False):
        times_s = op_times.measured_times(program, workload, THIS, tmp_path, onednn=onednn)
        assert set(times_s) == {op.name for op in workload.ops}
    assert len(measured) == 2
