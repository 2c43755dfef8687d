"""What the doctor finds here, and what it says when something is not there."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from gascompile.core import serial
from gascompile.cost_models.measure.host import MemoryLimit
from gascompile.machines import doctor
from gascompile.machines.doctor import Finding, Report, Status, examine
from gascompile.machines.resolve import preset
from tests.drives import read


def by_name(report: Report) -> dict[str, Finding]:
    names = [finding.name for finding in report.findings]
    assert len(names) == len(set(names))
    return {finding.name: finding for finding in report.findings}


def test_this_machine(tmp_path: Path) -> None:
    report = examine(tmp_path / "not" / "made" / "yet")
    found = by_name(report)
    assert report.healthy
    for name in ("python", "torch", "gascompile", "pulp", "highspy", "solver", "memory"):
        assert found[name].status is Status.OK
    assert found["bandwidths"].status is Status.WARN
    assert "measures it" in found["bandwidths"].remedy
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    for finding in examine(tmp_path).findings:
        assert finding.detail
        assert bool(finding.remedy) == (finding.status is not Status.OK)


def test_it_is_json(tmp_path: Path) -> None:
    report = examine(tmp_path)
    data = json.loads(serial.dumps(report))
    assert data["format"] == "gascompile.doctor/1"
    assert {"name", "status", "detail", "remedy"} == set(data["findings"][0])
    assert serial.from_json(Report, data) == report


def test_it_measures_when_asked_and_remembers(tmp_path: Path) -> None:
    found = by_name(examine(tmp_path, measure_with=read))
    assert found["nvme->cpu"].detail.startswith("1.00 GB/s (measured")
    assert "cpu memory" in found
    assert "cpu float32" in found
    assert by_name(examine(tmp_path))["nvme->cpu"] == found["nvme->cpu"]


def test_a_missing_solver_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_version = metadata.version

    def version(name: str) -> str:
        if name in {"pulp", "transformers"}:
            raise metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(metadata, "version", version)
    report = examine(tmp_path)
    found = by_name(report)
    assert not report.healthy
    assert found["pulp"].status is Status.MISSING
    assert "pip install" in found["pulp"].remedy
    assert "gascompile[hf]" in found["transformers"].remedy


def test_a_wrong_answer_of_the_solver_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_solve_two_variables", lambda: 2.5)
    report = examine(tmp_path)
    assert not report.healthy
    assert "answers 2.5" in by_name(report)["solver"].detail


def test_no_direct_io_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_direct_io", lambda folder: False)
    report = examine(tmp_path)
    assert report.healthy
    assert by_name(report)["cache folder: direct I/O"].status is Status.WARN


def test_little_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: 2**30)
    finding = by_name(examine(tmp_path))["cache folder: space"]
    assert finding.status is Status.WARN
    assert finding.detail.startswith("1.00 GiB free")


def test_the_memory_limit_names_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(size_bytes=2**31, origin="/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(doctor, "memory_limit", lambda: limit)
    detail = by_name(examine(tmp_path))["memory"].detail
    assert detail == "2.00 GiB, set by /sys/fs/cgroup/memory.max"


def test_a_remembered_machine_of_another_kind_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "remembered_machine", lambda cache_dir: preset("h100-gen5"))
    found = by_name(examine(tmp_path))
    assert found["nvme->gpu"].detail.startswith("14.00 GB/s (datasheet")


def test_a_missing_compiler_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = examine(tmp_path)
    assert report.healthy
    finding = by_name(report)["C++ compiler"]
    assert finding.status is Status.WARN
    assert "no-such-compiler" in finding.detail
