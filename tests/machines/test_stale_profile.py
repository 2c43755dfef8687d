"""Runs that disprove the machine's numbers: what is said, what is marked, when it is measured again."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torch.fx import symbolic_trace

from gascompile.core.checks.machine_files import preset
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines import resolve as machine_module
from gascompile.machines import run_within_budget, stale_profile
from gascompile.machines.resolve import (
    profile_of,
    remember_machine,
    remembered_path,
    resolve_machine,
)
from gascompile.machines.stale_profile import SUFFIX, Grader, is_stale, mark
from gascompile.runtime.transfer.engine import read_blocks
from tests.cost_models.hand_plans import streaming

HOUR_S = 3600.0


def planned(seconds: float) -> Plan:
    plan = streaming()
    return replace(
        plan, certificate=replace(plan.certificate, predicted_s=seconds, limit_s=seconds)
    )


def took(seconds: float, limit_s: float) -> RunReport:
    return RunReport(
        seconds=seconds,
        peak_bytes={},
        link_bytes={},
        stall_s=0.0,
        share_of_limit=limit_s / seconds,
        paths={},
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile that is two hours old."""
    path = tmp_path / "machine.json"
    path.write_text("{}")
    _age(path, 2 * HOUR_S)
    return path


def _age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_that_beats_its_limit_is_said_once_and_marks_the_profile(
    profile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grader = Grader(planned(1.0), lambda: profile)
    grader.grade(took(0.95, 1.0))
    assert not caplog.records
    grader.grade(took(0.5, 1.0))
    grader.grade(took(0.5, 1.0))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "faster than its physical limit of 1 s" in record.getMessage()
    assert "measured again" in record.getMessage()
    assert profile.with_suffix(SUFFIX).exists()


def test_slow_runs_count_only_in_a_row(profile: Path, caplog: pytest.LogCaptureFixture) -> None:
    grader = Grader(planned(1.0), lambda: profile)
    for seconds in (9.0, 9.0, 1.0, 9.0, 9.0):
        grader.grade(took(seconds, 1.0))
    assert not caplog.records
    grader.grade(took(9.0, 1.0))
    assert "much slower than the 1 s predicted" in caplog.text


def test_another_machines_numbers_are_spoken_of_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Grader(planned(1.0), lambda: None).grade(took(0.1, 1.0))
    assert "gascompile calibrate" in caplog.text


def test_a_tiny_plan_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Grader(planned(1e-4), lambda: None).grade(took(1e-5, 1e-4))
    assert not caplog.records


def test_what_was_measured_within_the_hour_is_not_measured_again(profile: Path) -> None:
    _age(profile, HOUR_S / 2)
    assert not mark(profile, "too fast")
    assert not profile.with_suffix(SUFFIX).exists()


def test_a_marked_profile_waits_for_an_idle_machine(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [1.0]
    monkeypatch.setattr(OtherWork, "num_processors", lambda self: busy[0])
    assert not is_stale(profile)
    assert mark(profile, "too fast")
    assert not is_stale(profile)
    busy[0] = 0.0
    assert is_stale(profile)
    # Measured since: the mark is older than the profile.
    _age(profile.with_suffix(SUFFIX), 3 * HOUR_S)
    assert not is_stale(profile)


def test_a_disproved_machine_is_measured_anew_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherWork, "num_processors", lambda self: 0.0)
    measured: list[Path] = []

    def measure(*, cache_dir: Path, read: object) -> object:
        measured.append(cache_dir)
        remember_machine(preset("cpu-nvme"), cache_dir)
        return preset("cpu-nvme")

    monkeypatch.setattr(machine_module, "measure_briefly", measure)
    resolve_machine(None, cache_dir=tmp_path, read=read_blocks)
    resolve_machine(None, cache_dir=tmp_path, read=read_blocks)
    assert len(measured) == 1
    path = remembered_path(tmp_path)
    _age(path, 2 * HOUR_S)
    assert mark(path, "too fast")
    resolve_machine(None, cache_dir=tmp_path, read=read_blocks)
    resolve_machine(None, cache_dir=tmp_path, read=read_blocks)
    assert len(measured) == 2
    assert not path.with_suffix(SUFFIX).exists()
    assert not mark(path, "too fast again")


def test_presets_and_the_emulated_accelerator_have_no_profile_to_forget(tmp_path: Path) -> None:
    assert profile_of(preset("cpu-nvme"), tmp_path) is None
    assert profile_of(preset("emulated"), tmp_path) is None
    assert stale_profile.FAR > 1


def test_what_a_run_disproved_is_said_once_for_each_plan(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """However often the session is opened again."""
    program = SimpleNamespace(graph_module=symbolic_trace(nn.Identity()))
    first, other = (SimpleNamespace(program=program, plan=planned(1.0)) for _ in range(2))
    for bundle in (first, first, other, other):
        run_within_budget._grade(Ran(took(0.1, 1.0)), bundle, tmp_path)  # type: ignore[arg-type]
    assert caplog.text.count("a run of") == 2


class Ran:
    """What has run once."""

    def __init__(self, report: RunReport) -> None:
        self.last_run = report
