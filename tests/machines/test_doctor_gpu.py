"""Each fault of a GPU as the doctor shows it: what is wrong, and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gascompile.cli import app
from gascompile.core.machine import IoSettings
from gascompile.machines import doctor
from gascompile.machines.doctor import Finding, Status, examine
from gascompile.machines.doctor_gpu import gpu_findings
from gascompile.runtime.devices.probe import GpuFacts
from tests.machines.fake_cuda import GIB, FakeCuda
from tests.runtime.fake_kvikio import CompatMode, Kvikio, uninstall
from tests.runtime.test_probe import BROKEN, HEALTHY

IO = IoSettings(num_threads=4, chunk_bytes=8 << 20)


def found(facts: GpuFacts, cuda: FakeCuda | None = None, io: IoSettings = IO) -> dict[str, Finding]:
    findings = gpu_findings(facts, io, cuda=cuda or FakeCuda())
    assert len({finding.name for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.detail
        assert bool(finding.remedy) == (finding.status is not Status.OK), finding
    return {finding.name: finding for finding in findings}


def test_a_machine_that_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    Kvikio().install(monkeypatch)
    everything = found(HEALTHY)
    assert {finding.status for finding in everything.values()} == {Status.OK}
    assert everything["gpu"].detail == "Some GPU"
    assert everything["driver"].detail == "580.95.05, torch is built for CUDA 13.0"
    assert everything["gpu memory free"].detail.startswith("7.00 GiB of 8.00 GiB;")
    assert everything["kvikio"].detail.startswith("26.2.0, compatibility mode AUTO: it takes GPUD")
    assert everything["GPUDirect Storage"].detail.startswith("active")
    assert "pin 64.00 MiB" in everything["pinned memory"].detail


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch)
    facts = replace(BROKEN, driver="", devices=(), has_udev=False, memlock_bytes=1)
    nothing = found(facts, FakeCuda(names=()))
    assert nothing["gpu"].status is Status.MISSING
    assert nothing["gpu"].detail.startswith("no driver: no NVIDIA driver is loaded")
    assert "install NVIDIA's driver" in nothing["gpu"].remedy
    assert nothing["driver"].status is Status.MISSING
    # What only a GPU would need is no fault without one.
    assert nothing["/run/udev"].status is nothing["pinned memory"].status is Status.OK


@pytest.mark.parametrize(
    ("facts", "module", "why", "remedy"),
    [
        (replace(HEALTHY, nvidia_fs=""), Kvikio(gds=False), "nvidia-fs", "modprobe nvidia-fs"),
        (replace(HEALTHY, has_udev=False), Kvikio(prefers_compat=True), "/run/udev", "--volume"),
        (HEALTHY, Kvikio(compat=CompatMode.ON), "KVIKIO_COMPAT_MODE", "unset KVIKIO_COMPAT_MODE"),
        (HEALTHY, Kvikio(gds=False), "GDS is not available", "gdscheck"),
    ],
)
def test_a_silent_fallback(
    facts: GpuFacts, module: Kvikio, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.install(monkeypatch)
    findings = found(facts)
    direct, kvikio = findings["GPUDirect Storage"], findings["kvikio"]
    assert direct.status is Status.MISSING
    assert kvikio.status is Status.WARN
    for finding in (direct, kvikio):
        assert why in finding.detail
        assert remedy in finding.remedy
    assert f"compatibility mode {module.compat.name}" in kvikio.detail
    assert (findings["/run/udev"].status is Status.WARN) == (not facts.has_udev)


def test_kvikio_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch)
    findings = found(replace(HEALTHY, kvikio=""))
    assert findings["kvikio"].status is Status.MISSING
    assert "pip install 'gascompile[gpu]'" in findings["kvikio"].remedy
    assert "KvikIO cannot be used" in findings["GPUDirect Storage"].detail


def test_a_limit_on_locked_memory_below_what_reads_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    Kvikio().install(monkeypatch)
    facts = replace(HEALTHY, memlock_bytes=IO.staging_bytes - 1)
    finding = found(facts)["pinned memory"]
    assert finding.status is Status.WARN
    assert "(ulimit -l), pinned buffers take 64.00 MiB" in finding.detail
    assert "--ulimit memlock=-1" in finding.remedy
    enough = replace(HEALTHY, memlock_bytes=IO.staging_bytes)
    assert found(enough)["pinned memory"].status is Status.OK


def test_memory_that_others_hold_and_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    Kvikio().install(monkeypatch)
    finding = found(HEALTHY, FakeCuda(free_bytes=2 * GIB, own_bytes=1 * GIB))["gpu memory free"]
    assert finding.status is Status.WARN
    assert finding.detail.endswith("other processes hold 5.00 GiB")
    assert "nvidia-smi" in finding.remedy
    hung = found(HEALTHY, FakeCuda(error="CUDA error: unknown error"))["gpu memory free"]
    assert hung.status is Status.MISSING
    assert "unknown error" in hung.detail


def test_the_command_shows_each_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Kvikio(prefers_compat=True).install(monkeypatch)
    facts = replace(HEALTHY, has_udev=False, memlock_bytes=1 << 20)
    monkeypatch.setattr(doctor, "look_at_gpu", lambda cuda: facts)
    real = gpu_findings
    monkeypatch.setattr(
        doctor, "gpu_findings", lambda facts, io, cuda: real(facts, io, cuda=FakeCuda())
    )
    shown = CliRunner().invoke(app, ["doctor", "--json", "--cache-dir", str(tmp_path)])
    assert shown.exit_code == 0
    data = {item["name"]: item for item in json.loads(shown.stdout)["findings"]}
    names = ("gpu", "driver", "gpu memory free", "pinned memory")
    assert {*names, "kvikio", "/run/udev", "GPUDirect Storage"} <= data.keys()
    assert data["pinned memory"]["status"] == data["/run/udev"]["status"] == "warn"
    assert "/run/udev cannot be read" in data["GPUDirect Storage"]["detail"]
    for_people = CliRunner().invoke(app, ["doctor", "--cache-dir", str(tmp_path)])
    assert "ulimit -l" in for_people.stdout
    assert "/run/udev" in for_people.stdout


def test_the_staging_is_that_of_the_remembered_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gascompile.machines.resolve import preset

    io = IoSettings(num_threads=2, chunk_bytes=1 << 20)
    machine = replace(preset("h100-gen5"), io=io)
    monkeypatch.setattr(doctor, "remembered_machine", lambda cache_dir: machine)
    report = examine(tmp_path, facts=HEALTHY, cuda=FakeCuda())
    (finding,) = (x for x in report.findings if x.name == "pinned memory")
    assert "pin 4.00 MiB" in finding.detail
