"""Each fault of a GPU and of its path from the drives, told apart from facts alone."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import DeviceError
from gascompile.runtime.devices import probe
from gascompile.runtime.devices.probe import (
    DeviceMemory,
    GpuFacts,
    device_fault,
    look,
    storage_faults,
)

HEALTHY = GpuFacts(
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    driver="580.95.05",
    devices=("/dev/nvidia0",),
    visible=None,
    is_available=True,
    names=("Some GPU",),
    triton="3.6.0",
    kvikio="26.2.0",
    nvidia_fs="2.26",
    has_udev=True,
)
BROKEN = replace(HEALTHY, is_available=False, names=())


class Cuda:
    """Stands in for ``torch.cuda``."""

    def __init__(self, names: tuple[str, ...] = (), problem: str = "") -> None:
        self._names, self._problem = names, problem

    def is_available(self) -> bool:
        if self._problem:
            warnings.warn(self._problem, UserWarning, stacklevel=2)
        return bool(self._names)

    def device_count(self) -> int:
        return len(self._names)

    def get_device_name(self, index: int) -> str:
        return self._names[index]

    def mem_get_info(self) -> tuple[int, int]:
        return 3 << 30, 8 << 30

    def memory_reserved(self) -> int:
        return 1 << 30


@pytest.mark.parametrize(
    ("changes", "cause", "says"),
    [
        ({"driver": "", "devices": (), "torch_cuda": ""}, probe.NO_DRIVER, "driver"),
        ({"devices": ()}, probe.NO_DEVICE, "--gpus all"),
        ({"torch_cuda": "", "torch_version": "2.11.0+cpu"}, probe.TORCH_BUILD, "2.11.0\\+cpu"),
        ({"visible": ""}, probe.HIDDEN, "CUDA_VISIBLE_DEVICES"),
        ({"visible": "-1"}, probe.HIDDEN, "hides 1 device"),
        ({"problem": "too old"}, probe.DRIVER_REFUSED, "580.95.05: too old.*CUDA 13.0 or newer"),
    ],
)
def test_the_cause_of_a_missing_device(changes: dict[str, str], cause: str, says: str) -> None:
    facts = replace(BROKEN, **changes)  # type: ignore[arg-type]
    fault = device_fault(facts)
    assert fault is not None
    assert fault.cause == cause
    with pytest.raises(DeviceError, match=says) as caught:
        probe.require_device(facts, machine="mine")
    assert caught.value.cause == cause
    assert "'mine'" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.cause) == (str(caught.value), cause)


def test_a_device_that_torch_can_use_has_no_fault() -> None:
    assert device_fault(HEALTHY) is None
    assert device_fault(replace(HEALTHY, driver="", devices=())) is None
    probe.require_device(HEALTHY, machine="mine")


@pytest.mark.parametrize(
    ("changes", "causes"),
    [
        ({}, []),
        ({"kvikio": ""}, ["no kvikio"]),
        ({"nvidia_fs": ""}, ["no nvidia-fs"]),
        ({"has_udev": False}, ["no udev"]),
        ({"nvidia_fs": "", "has_udev": False}, ["no nvidia-fs", "no udev"]),
    ],
)
def test_what_keeps_reads_out_of_the_direct_path(
    changes: dict[str, str], causes: list[str]
) -> None:
    faults = storage_faults(replace(HEALTHY, **changes))  # type: ignore[arg-type]
    assert [fault.cause for fault in faults] == causes
    assert all(fault.remedy for fault in faults)


def test_system_files_are_read(tmp_path: Path) -> None:
    assert look(root=tmp_path, cuda=Cuda(), environment={}).driver == ""
    driver = tmp_path / "proc" / "driver"
    for folder in (
        driver / "nvidia",
        driver / "nvidia-fs",
        tmp_path / "dev",
        tmp_path / "run/udev",
    ):
        folder.mkdir(parents=True)
    (driver / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX x86_64  580.95.05  Tue\n")
    (driver / "nvidia-fs" / "version").write_text("version: 2.26\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    facts = look(root=tmp_path, cuda=Cuda(), environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert (facts.driver, facts.nvidia_fs, facts.has_udev) == ("580.95.05", "2.26", True)
    assert [Path(path).name for path in facts.devices] == ["nvidia0", "nvidia1"]
    assert facts.visible == "-1"
    assert facts.torch_version == torch.__version__


def test_windows_has_the_driver_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert look(root=tmp_path, cuda=Cuda(), environment={}).driver == "of Windows"


def test_what_torch_says_of_a_driver_is_kept(tmp_path: Path) -> None:
    facts = look(root=tmp_path, cuda=Cuda(problem="The driver is too old\nmore"), environment={})
    assert facts.problem == "The driver is too old"
    assert not facts.is_available


def test_names_are_those_of_usable_devices(tmp_path: Path) -> None:
    facts = look(root=tmp_path, cuda=Cuda(names=("A", "B")), environment={})
    assert facts.is_available
    assert facts.names == ("A", "B")


def test_memory_that_others_took_is_said() -> None:
    found = probe.device_memory(cuda=Cuda())
    assert found == DeviceMemory(free_bytes=3 << 30, total_bytes=8 << 30, own_bytes=1 << 30)
    probe.require_memory(found, 3 << 30, device="Some GPU")
    with pytest.raises(DeviceError, match=r"other processes.* hold 4\.00 GiB") as caught:
        probe.require_memory(found, (3 << 30) + 1, device="Some GPU")
    assert caught.value.cause == probe.DEVICE_MEMORY
    assert f"budget of {3 << 30} bytes" in str(caught.value)
