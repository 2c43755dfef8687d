"""What may run here: memory that another process took since the plan was made, limits, reads by another path."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from gascompile.api.plan import simulate
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.machine import check_machine, source_warnings
from gascompile.core.errors import DeviceError
from gascompile.core.machine import IoSettings, Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import OpSpec as Op
from gascompile.core.workload import TensorKind, TensorSpec, Workload
from gascompile.machines.admission import admit, admit_plan, admit_saved
from gascompile.machines.gpu import with_free_memory
from gascompile.machines.resolve import preset
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from gascompile.runtime.devices import probe
from gascompile.runtime.devices.cuda import CudaApi, CudaDevice, PinnedMemory
from gascompile.runtime.devices.probe import DeviceMemory
from gascompile.runtime.transfer.kvikio_path import CUFILE_COMPAT, GPU_DIRECT
from tests.machines.fake_cuda import GIB, FakeCuda
from tests.runtime.fake_kvikio import Kvikio, uninstall
from tests.runtime.test_probe import BROKEN, HEALTHY

MIB = 1 << 20
DIRECT = IoSettings(num_threads=8, engine="kvikio", path=GPU_DIRECT, least_bytes=MIB)
GPU = replace(preset("h100-gen5"), io=DIRECT)


def plan_for(machine: Machine = GPU) -> Plan:
    tensors = [
        TensorSpec(name=f"w{i}", size_bytes=64 * MIB, kind=TensorKind.WEIGHT) for i in range(8)
    ]
    ops = [Op(name=f"op{i}", time_s={"gpu": 1e-4}, reads=(f"w{i}",)) for i in range(8)]
    workload = Workload(name="toy", repeats=True, tensors=tuple(tensors), ops=tuple(ops))
    made = make_plan(
        workload, machine, Budget(gpu=256 * MIB, cpu=0), fingerprint={}, time_limit_s=5
    )
    verify(made)
    return made


# ---------------------------------------------------------------- the memory of the GPU


def test_a_plan_that_finds_its_memory_is_admitted() -> None:
    plan = plan_for()
    needed_bytes = plan.peak_bytes["gpu"] + GPU.library_bytes("gpu")
    admit_plan(plan, memory=DeviceMemory(free_bytes=needed_bytes, total_bytes=8 * GIB))
    own = DeviceMemory(free_bytes=0, total_bytes=8 * GIB, own_bytes=needed_bytes)
    admit_plan(plan, memory=own)


def test_memory_that_another_process_took_since_is_said_with_who_has_it() -> None:
    plan = plan_for()
    needed_bytes = plan.peak_bytes["gpu"] + GPU.library_bytes("gpu")
    taken = DeviceMemory(free_bytes=needed_bytes - 1, total_bytes=8 * GIB, own_bytes=0)
    with pytest.raises(DeviceError, match=r"other processes.* hold") as caught:
        admit_plan(plan, memory=taken)
    assert caught.value.cause == probe.DEVICE_MEMORY
    assert "Stop what nvidia-smi lists, or pass a budget of" in str(caught.value)
    assert f"{needed_bytes - 1} bytes or less" in str(caught.value)


def test_a_plan_for_another_backend_asks_no_gpu() -> None:
    plan = replace(plan_for(), machine=replace(GPU, backend="emulated"))
    admit_plan(plan)


def test_without_a_budget_a_plan_counts_on_what_is_free() -> None:
    tier = GPU.tiers["gpu"]
    cuda = FakeCuda(free_bytes=3 * GIB + 5, total_bytes=tier.size_bytes, own_bytes=GIB)
    now = with_free_memory(GPU, cuda=cuda)
    assert now.tiers["gpu"].size_bytes == 4 * GIB
    assert "held by contexts, libraries and other processes" in now.tiers["gpu"].source
    free = FakeCuda(free_bytes=tier.size_bytes + GIB, total_bytes=tier.size_bytes + GIB)
    assert with_free_memory(GPU, cuda=free) is GPU


def test_an_arena_for_which_there_is_no_memory_left() -> None:
    class Full(CudaApi):
        runtime = FakeCuda(free_bytes=GIB, own_bytes=GIB)

        def device(self, number: int | None) -> torch.device:
            return torch.device("cuda", 0)

        def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(DeviceError, match=r"hold 6\.00 GiB\. Stop what nvidia-smi") as caught:
        CudaDevice(api=Full()).arena(2 * GIB)
    assert caught.value.cause == probe.DEVICE_MEMORY


# ---------------------------------------------------------------- pinned memory


def test_pinned_memory_that_the_driver_refuses() -> None:
    cuda = FakeCuda()
    cuda.runtime.limit_bytes = MIB
    with pytest.raises(DeviceError, match=r"refused to pin 2\.00 MiB.*ulimit -l") as caught:
        PinnedMemory(2 * MIB, cuda)
    assert caught.value.cause == probe.PINNED_MEMORY
    assert "--ulimit memlock=-1" in str(caught.value)
    memory = PinnedMemory(MIB, cuda)
    assert list(cuda.runtime.pinned.values()) == [MIB]
    memory.close()
    memory.close()
    assert not cuda.runtime.pinned


def test_a_limit_on_locked_memory_is_a_fault_and_no_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = plan_for()
    needed_bytes = plan.machine.io.staging_bytes
    assert probe.pinned_fault(HEALTHY, needed_bytes) is None
    facts = replace(HEALTHY, memlock_bytes=needed_bytes)
    assert probe.pinned_fault(facts, needed_bytes) is None
    found = probe.pinned_fault(facts, needed_bytes + 1)
    assert found is not None
    assert found.cause == probe.PINNED_LIMIT
    memory = DeviceMemory(free_bytes=8 * GIB, total_bytes=8 * GIB)
    low = replace(HEALTHY, memlock_bytes=needed_bytes - 1)
    with caplog.at_level(logging.WARNING, logger="gascompile"):
        admit_plan(plan, memory=memory, facts=low)
    assert "(ulimit -l), pinned buffers take" in caplog.text
    assert "memlock=-1" in caplog.text


# ---------------------------------------------------------------- the path of reads


def test_no_driver_refuses_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch)
    facts = replace(BROKEN, driver="", devices=())
    with pytest.raises(DeviceError, match=r"no NVIDIA driver is loaded.*install") as caught:
        admit(GPU, facts=facts)
    assert caught.value.cause == probe.NO_DRIVER


def test_a_machine_whose_path_is_there_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    Kvikio().install(monkeypatch)
    assert admit(GPU, facts=HEALTHY) is GPU
    plan = plan_for()
    assert admit_saved(plan, facts=HEALTHY) is plan
    # Measured in compatibility mode, it was chosen as it is.
    Kvikio(prefers_compat=True).install(monkeypatch)
    slow = replace(GPU, io=replace(DIRECT, path=f"{CUFILE_COMPAT} (no nvidia-fs)"))
    assert admit(slow, facts=HEALTHY) is slow
    uninstall(monkeypatch)
    plain = replace(GPU, io=IoSettings())
    assert admit(plain, facts=HEALTHY) is plain


FAULTS = {
    "no kvikio": (None, HEALTHY, "KvikIO cannot be used", "pip install 'gascompile[gpu]'"),
    "no udev": (
        Kvikio(prefers_compat=True),
        replace(HEALTHY, has_udev=False),
        "/run/udev cannot be read",
        "--volume /run/udev:/run/udev:ro",
    ),
    "no GDS": (
        Kvikio(gds=False),
        replace(HEALTHY, nvidia_fs=""),
        "the kernel module nvidia-fs is not loaded",
        "modprobe nvidia-fs",
    ),
    "forced": (
        Kvikio(prefers_compat=True),
        HEALTHY,
        "KVIKIO_COMPAT_MODE",
        "gascompile doctor",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reads_that_take_another_path_are_re_costed_and_said(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, facts, why, remedy = FAULTS[fault]
    uninstall(monkeypatch) if module is None else module.install(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="gascompile"):
        now = admit(GPU, facts=facts)
    check_machine(now)
    assert (now.io.engine, now.io.path, now.io.least_bytes) == ("reads", "", 0)
    links = {link.name: link for link in GPU.links}
    read, copy = links["nvme->cpu"], links["cpu->gpu"]
    wanted = min(read.bandwidth_bytes_per_s, copy.bandwidth_bytes_per_s)
    direct = now.link("nvme->gpu")
    assert direct.bandwidth_bytes_per_s == min(wanted, links["nvme->gpu"].bandwidth_bytes_per_s)
    (warning,) = (text for text in source_warnings(now) if text.startswith("re-costed"))
    for text in (warning, caplog.text):
        assert why in text
        assert remedy in text
        assert "aligned reads through pinned memory" in text
    assert warning in plan_with_warnings(now).warnings
    assert admit(now, facts=facts) is now


def plan_with_warnings(machine: Machine) -> Plan:
    from gascompile.api.plan import plan

    workload = plan_for().workload
    return plan(workload, Budget(gpu=256 * MIB, cpu=0), machine)


def test_a_saved_plan_is_re_costed_by_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_drive = tuple(
        replace(link, bandwidth_bytes_per_s=3e9) if link.name == "nvme->cpu" else link
        for link in GPU.links
    )
    machine = replace(GPU, links=slow_drive)
    plan = plan_for(machine)
    uninstall(monkeypatch)
    now = admit_saved(plan, facts=HEALTHY)
    verify(now)
    assert now.steps == plan.steps
    assert now.certificate.predicted_s == pytest.approx(simulate(now).seconds)
    assert now.certificate.predicted_s > 2 * plan.certificate.predicted_s
    assert now.certificate.limit_s > plan.certificate.limit_s
    assert any(text.startswith("re-costed") for text in now.warnings)
    assert serial.from_json(Plan, serial.to_json(now)) == now


def test_links_that_do_not_tell_refuse_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    links = tuple(link for link in GPU.links if link.name != "cpu->gpu")
    machine = replace(GPU, links=links)
    uninstall(monkeypatch)
    with pytest.raises(DeviceError, match=r"reads with KvikIO.*gascompile calibrate") as caught:
        admit(machine, facts=HEALTHY)
    assert caught.value.cause == probe.NO_KVIKIO
    Kvikio(gds=False).install(monkeypatch)
    with pytest.raises(DeviceError, match="not active") as caught:
        admit(machine, facts=HEALTHY)
    assert caught.value.cause == probe.NO_GDS
