"""Looks at what a GPU and its path from the drives need, and says what is missing: driver, torch build, GDS.

Facts are gathered in one place and judged in others, so that each fault can be told apart from facts alone,
without the machine that has it. Looking starts no CUDA context: memory is asked for separately.
"""

from __future__ import annotations

import os
import re
import resource
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gascompile.core.errors import DeviceError
from gascompile.core.sizes import format_size

NO_DRIVER = "no driver"
NO_DEVICE = "no device"
TORCH_BUILD = "torch build"
HIDDEN = "hidden"
DRIVER_REFUSED = "driver refused"
DEVICE_MEMORY = "device memory"
PINNED_MEMORY = "pinned memory"
PINNED_LIMIT = "pinned limit"
NO_KVIKIO = "no kvikio"
NO_GDS = "no GDS"
"""The causes of a ``DeviceError``; ``Fault.cause`` has those of slow paths as well."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KVIKIO = ("kvikio-cu13", "kvikio-cu12", "kvikio")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What was found; an empty text stands for what is not there."""

    torch_version: str
    torch_cuda: str
    """The version of CUDA that torch was built for."""
    driver: str
    devices: tuple[str, ...]
    """Device files, ``/dev/nvidia0`` and so on."""
    visible: str | None
    """What the environment restricts CUDA to; ``None`` where it does not."""
    is_available: bool
    problem: str = ""
    """What torch says about a device that it cannot use."""
    names: tuple[str, ...] = ()
    triton: str = ""
    kvikio: str = ""
    nvidia_fs: str = ""
    """The version of the kernel module that GPUDirect Storage needs; ``loaded`` where it does not tell."""
    has_udev: bool = False
    memlock_bytes: int | None = None
    """How much memory this process may lock; ``None`` without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, and what to do about it."""

    cause: str
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device's memory."""

    free_bytes: int
    total_bytes: int
    own_bytes: int = 0
    """Held by torch in this process."""

    @property
    def others_bytes(self) -> int:
        """Held by other processes, and by contexts and libraries of this one."""
        return max(self.total_bytes - self.free_bytes - self.own_bytes, 0)


def look(
    *,
    root: Path = Path("/"),
    cuda: Any = torch.cuda,
    environment: Mapping[str, str] = os.environ,
) -> GpuFacts:
    """Return the facts about this machine's GPU and its path to the drives.

    Args:
        root: what system files are read under.
        cuda: ``torch.cuda``, or what stands in for it.
        environment: variables of the process.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = bool(cuda.is_available())
    names = tuple(cuda.get_device_name(i) for i in range(cuda.device_count()))
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return GpuFacts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        driver=_driver(root),
        devices=tuple(sorted(str(path) for path in (root / "dev").glob("nvidia[0-9]*"))),
        visible=environment.get(_VISIBLE),
        is_available=is_available,
        problem=" ".join(str(warning.message).partition("\n")[0] for warning in said),
        names=names if is_available else (),
        triton=_version("triton"),
        kvikio=next((version for name in _KVIKIO if (version := _version(name))), ""),
        nvidia_fs=_nvidia_fs(root),
        has_udev=os.access(root / "run" / "udev", os.R_OK),
        memlock_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
    )


def device_fault(facts: GpuFacts) -> Fault | None:
    """Return why torch has no CUDA device, the cause that comes first; ``None`` where it has one."""
    if facts.is_available:
        return None
    if not facts.driver:
        return Fault(
            cause=NO_DRIVER,
            detail="no NVIDIA driver is loaded: /proc/driver/nvidia/version is not there",
            remedy="install NVIDIA's driver and restart; on a machine without a GPU, machine=None computes "
            'on the processor and machine="emulated" on an emulated accelerator',
        )
    if not facts.devices:
        return Fault(
            cause=NO_DEVICE,
            detail=f"the driver {facts.driver} is loaded, but /dev has no nvidia0",
            remedy="start the container with the GPU, as in docker run --gpus all",
        )
    if not facts.torch_cuda:
        return Fault(
            cause=TORCH_BUILD,
            detail=f"torch {facts.torch_version} is built without CUDA",
            remedy="install a build of torch for CUDA in its place: https://pytorch.org/get-started/locally/",
        )
    if facts.visible is not None and facts.visible.strip() in {"", "-1", "NoDevFiles"}:
        return Fault(
            cause=HIDDEN,
            detail=f"{_VISIBLE}={facts.visible!r} hides {len(facts.devices)} device(s)",
            remedy=f"unset {_VISIBLE}, or name a device in it",
        )
    return Fault(
        cause=DRIVER_REFUSED,
        detail=f"torch {facts.torch_version} cannot use the driver {facts.driver}: "
        f"{facts.problem or 'it gives no reason'}",
        remedy=f"install a driver for CUDA {facts.torch_cuda} or newer, or a build of torch for an older CUDA",
    )


def require_device(facts: GpuFacts, *, machine: str) -> None:
    """Return if torch has a CUDA device for ``machine``; raises ``DeviceError`` with the cause."""
    fault = device_fault(facts)
    if fault is not None:
        raise DeviceError(
            f"the machine '{machine}' computes on a GPU, which cannot be used here: {fault.detail}. "
            f"What to do: {fault.remedy}",
            cause=fault.cause,
        )


def storage_faults(facts: GpuFacts) -> tuple[Fault, ...]:
    """Return everything that keeps reads from going straight from a drive to the GPU."""
    faults = []
    if not facts.kvikio:
        faults.append(
            Fault(
                cause=NO_KVIKIO,
                detail="KvikIO is not installed",
                remedy="pip install 'gascompile[gpu]' on a machine with a GPU",
            )
        )
    if not facts.nvidia_fs:
        faults.append(
            Fault(
                cause="no nvidia-fs",
                detail="the kernel module nvidia-fs is not loaded",
                remedy="install the package nvidia-gds and run modprobe nvidia-fs, on the host if this is a container",
            )
        )
    if not facts.has_udev:
        faults.append(
            Fault(
                cause="no udev",
                detail="/run/udev cannot be read, so KvikIO falls back to reads through RAM",
                remedy="start the container with --volume /run/udev:/run/udev:ro",
            )
        )
    return tuple(faults)


def pinned_fault(facts: GpuFacts, needed_bytes: int) -> Fault | None:
    """Return what stands against ``needed_bytes`` of pinned memory: the limit of this process on locked memory.

    Drivers differ in whether they heed it, so it is no reason yet to refuse a plan.
    """
    limit_bytes = facts.memlock_bytes
    if limit_bytes is None or needed_bytes <= limit_bytes:
        return None
    return Fault(
        cause=PINNED_LIMIT,
        detail=f"this process may lock {format_size(limit_bytes)} of memory (ulimit -l), "
        f"pinned buffers take {format_size(needed_bytes)}",
        remedy="raise the limit: docker run --ulimit memlock=-1, or memlock in /etc/security/limits.conf",
    )


def device_memory(*, cuda: Any = torch.cuda) -> DeviceMemory:
    """Return what is free on the current device. Starts a CUDA context if there is none yet."""
    free_bytes, total_bytes = cuda.mem_get_info()
    return DeviceMemory(
        free_bytes=int(free_bytes),
        total_bytes=int(total_bytes),
        own_bytes=int(cuda.memory_reserved()),
    )


def require_memory(memory: DeviceMemory, needed_bytes: int, *, device: str) -> None:
    """Return if ``needed_bytes`` of the device are free; raises ``DeviceError`` that says who has the rest."""
    if needed_bytes <= memory.free_bytes:
        return
    raise DeviceError(
        f"the plan needs {format_size(needed_bytes)} of {device}, of whose {format_size(memory.total_bytes)} only "
        f"{format_size(memory.free_bytes)} are free: torch holds {format_size(memory.own_bytes)} in this process, "
        f"other processes, contexts and libraries hold {format_size(memory.others_bytes)}. Stop what "
        f"nvidia-smi lists, or pass a budget of {memory.free_bytes} bytes or less",
        cause=DEVICE_MEMORY,
    )


def _driver(root: Path) -> str:
    text = _text(root / "proc" / "driver" / "nvidia" / "version")
    if not text:
        # In WSL the driver is the one of Windows.
        return "of Windows" if (root / "dev" / "dxg").exists() else ""
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return version[1] if version else "loaded"


def _nvidia_fs(root: Path) -> str:
    if not (root / "proc" / "driver" / "nvidia-fs").is_dir():
        return ""
    text = _text(root / "proc" / "driver" / "nvidia-fs" / "version")
    version = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    return version[0] if version else "loaded"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # what is not there is the finding


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def usable_gpu() -> str:
    """Return the name of the GPU that plans for this machine compute on; empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name())
