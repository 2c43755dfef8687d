"""Faults of a device and of its path from the drives, through a whole compile: what is said, and what runs then."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import DeviceError, StorageError
from gascompile.core.machine import Machine
from gascompile.machines.resolve import resolve_machine
from gascompile.passes.verify.walk import verify
from gascompile.runtime.devices import probe
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.runtime.transfer.kvikio_path import GPU_DIRECT
from tests.runtime.fake_kvikio import Kvikio, uninstall
from tests.runtime.test_probe import HEALTHY

BUDGET = 420 << 10
LINK = "nvme->gpu"
MIB = 1 << 20


@pytest.fixture
def machine(cache: Path) -> Machine:
    """An accelerator that KvikIO was the fastest to read to, from the drive alone.

    Its speeds are the preset's: what is measured here depends on what else runs.
    """
    here = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
    found = replace(preset("emulated"), name=here.name)
    links = tuple(
        replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)
        if link.name == LINK
        else link
        for link in found.links
    )
    io = replace(found.io, num_threads=2, chunk_bytes=MIB, engine="kvikio", path=GPU_DIRECT)
    return replace(found, links=links, io=io)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    """GPUDirect Storage is active."""
    monkeypatch.setattr(probe, "look", lambda: HEALTHY)
    monkeypatch.setattr("gascompile.machines.read_path.look", lambda: HEALTHY)
    return Kvikio().install(monkeypatch)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(160, 160) for _ in range(12)]).eval()


def compiled_for(machine: Machine, cache: Path) -> gascompile.CompiledModel:
    return gascompile.compile(
        model(),
        gascompile.Budget(gpu=BUDGET, cpu=8 * MIB),
        example_inputs=(torch.ones(2, 160),),
        machine=machine,
        cache_dir=cache,
        fuse="off",
    )


def assert_runs(compiled: Callable[..., torch.Tensor]) -> None:
    twin = model()
    for _ in range(2):
        x = torch.randn(2, 160)
        torch.testing.assert_close(compiled(x), twin(x).detach())


def call(compiled: gascompile.CompiledModel, *, times: int) -> None:
    """Run: what was asked for ahead before a fault is there, so a fault may show only later."""
    for _ in range(times):
        compiled(torch.ones(2, 160))


def test_a_plan_records_the_path_and_a_run_reports_it(
    machine: Machine, cache: Path, direct: Kvikio
) -> None:
    with compiled_for(machine, cache) as compiled:
        assert_runs(compiled)
        assert compiled.plan.link_bytes[LINK] > 0
        assert compiled.plan.machine.io.path == GPU_DIRECT
        assert compiled.last_run is not None
        assert GPU_DIRECT in compiled.last_run.paths[LINK]
        assert not [text for text in compiled.plan.warnings if "re-costed" in text]
    assert direct.reads
    assert sorted(direct.opened) == sorted(set(direct.opened)), "each file once"


def test_without_kvikio_the_plan_is_made_for_aligned_reads(
    machine: Machine, cache: Path, direct: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiled_for(machine, cache) as compiled:
        fast_s = compiled.plan.certificate.predicted_s
    uninstall(monkeypatch)
    with compiled_for(machine, cache) as compiled:
        assert compiled.plan.machine.io.engine == "reads"
        assert compiled.plan.certificate.predicted_s > fast_s
        (warning,) = (text for text in compiled.plan.warnings if text.startswith("re-costed"))
        assert "KvikIO cannot be used" in warning
        assert "pip install 'gascompile[gpu]'" in warning
        assert_runs(compiled)
        assert compiled.last_run is not None
        assert GPU_DIRECT not in compiled.last_run.paths[LINK]


def test_a_bundle_that_finds_no_direct_path_is_re_costed(
    machine: Machine, cache: Path, direct: Kvikio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with compiled_for(machine, cache) as compiled:
        compiled.save(tmp_path / "bundle")
        plan = compiled.plan
    facts = replace(HEALTHY, has_udev=False)
    monkeypatch.setattr(probe, "look", lambda: facts)
    monkeypatch.setattr("gascompile.machines.read_path.look", lambda: facts)
    direct.prefers_compat = True
    with gascompile.load(tmp_path / "bundle") as loaded:
        verify(loaded.plan)
        assert loaded.plan.steps == plan.steps
        assert loaded.plan.certificate.predicted_s > plan.certificate.predicted_s
        assert any("/run/udev cannot be read" in text for text in loaded.plan.warnings)
        assert any("--volume /run/udev" in text for text in loaded.plan.warnings)
        assert_runs(loaded)


def test_a_drive_that_fails_leaves_the_model_usable(
    machine: Machine, cache: Path, direct: Kvikio
) -> None:
    def fail(path: str, offset: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    quiet = direct.before
    with compiled_for(machine, cache) as compiled:
        assert_runs(compiled)
        direct.before = fail
        with pytest.raises(StorageError, match=r"Input/output error; check the drive"):
            call(compiled, times=3)
        direct.before = quiet
        assert_runs(compiled)


def test_pinned_memory_that_is_refused_names_the_limit_and_keeps_nothing(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    arenas: list[Arena] = []
    real_arena = EmulatedDevice.arena

    def pinned(self: EmulatedDevice, size_bytes: int) -> Arena:
        refused.append(size_bytes)
        raise DeviceError("the driver refused; ulimit -l", cause=probe.PINNED_MEMORY)

    def arena(self: EmulatedDevice, size_bytes: int, early: object = None) -> Arena:
        arenas.append(real_arena(self, size_bytes, None))
        return arenas[-1]

    plain = replace(machine, io=replace(machine.io, engine="reads"))
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedDevice, "pinned", pinned)
        patch.setattr(EmulatedDevice, "arena", arena)
        with pytest.raises(DeviceError, match="ulimit -l") as caught:
            compiled_for(plain, cache)
    assert caught.value.cause == probe.PINNED_MEMORY
    assert refused == [plain.io.staging_bytes], "the planned size, in one piece"
    with compiled_for(plain, cache) as compiled:
        assert_runs(compiled)


def test_memory_that_is_taken_between_planning_and_running(
    machine: Machine, cache: Path, direct: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiled_for(machine, cache)
    assert_runs(compiled)
    compiled.close()

    def taken(self: EmulatedDevice, size_bytes: int, early: object = None) -> Arena:
        found = probe.DeviceMemory(free_bytes=size_bytes - 1, total_bytes=1 << 30)
        probe.require_memory(found, size_bytes, device="the accelerator")
        raise AssertionError("unreachable")

    with monkeypatch.context() as patch:
        patch.setattr(EmulatedDevice, "arena", taken)
        with pytest.raises(DeviceError, match=r"Stop what nvidia-smi lists") as caught:
            compiled(torch.ones(2, 160))
    assert caught.value.cause == probe.DEVICE_MEMORY
    assert_runs(compiled)
    compiled.close()
