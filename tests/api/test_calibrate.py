"""Calibration: the correction by whole runs, with a model of a few kilobytes; nothing here is about speed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.api.calibrate import Shape, Trials, calibrate_machine, num_stages
from gascompile.core import serial
from gascompile.core.checks.machine import check_machine
from gascompile.core.machine import Machine
from gascompile.cost_models.measure.machine import THOROUGH
from gascompile.machines.resolve import remembered_machine
from tests.drives import read

TRIALS = Trials(
    tiny=Shape(width=64, inner=64, num_blocks=1, outputs=64),
    large=Shape(width=128, inner=256, num_blocks=1, outputs=128),
    num_runs=3,
)
EFFORT = replace(THOROUGH, num_calls=1, matrix_limit_s=0.1, disk_limit_s=0.1, together_s=0.05)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Path, list[str]]:
    folder = tmp_path_factory.mktemp("calibration")
    stages: list[str] = []
    machine = calibrate_machine(
        cache_dir=folder, read=read, stage=stages.append, effort=EFFORT, trials=TRIALS
    )
    return machine, folder, stages


def test_it_is_remembered_and_leaves_nothing_else(
    calibrated: tuple[Machine, Path, list[str]],
) -> None:
    machine, folder, _ = calibrated
    assert remembered_machine(folder) == machine
    assert os.listdir(folder) == ["machine"]


def test_it_passes_the_checks_and_survives_json(
    calibrated: tuple[Machine, Path, list[str]],
) -> None:
    machine = calibrated[0]
    check_machine(machine)
    assert serial.from_json(Machine, serial.to_json(machine)) == machine


def test_every_stage_is_announced(calibrated: tuple[Machine, Path, list[str]]) -> None:
    assert len(calibrated[2]) == len(set(calibrated[2])) == num_stages()


def test_corrections_name_both_numbers(calibrated: tuple[Machine, Path, list[str]]) -> None:
    machine = calibrated[0]
    (memory,) = machine.memory
    assert memory.op_overhead_s > 0
    assert "op overhead of" in memory.source
    assert " us alone" in memory.source
    assert all("by runs of 1 and 64 rows in float32" in rate.source for rate in machine.rates)
    sources = [link.source for link in machine.links] + [rate.source for rate in machine.rates]
    assert all("thoroughly:" in source for source in sources)


def test_an_old_machine_file_has_rates_without_points() -> None:
    data = serial.to_json(Machine(name="old", places=(), links=()))
    assert isinstance(data, dict)
    old = {**data, "rates": [{"device": "cpu", "dtype": "float32", "flops_per_second": 1e9}]}
    assert serial.from_json(Machine, old).rates[0].points == ()
