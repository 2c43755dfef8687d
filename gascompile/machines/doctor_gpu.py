"""The doctor's look at a GPU and its path from the drives: each fault that slows a plan down or refuses it.

Without a GPU nothing but its absence is worth a remedy: what it would need besides is listed as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from gascompile.core.errors import DeviceError
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import format_size
from gascompile.machines.findings import Finding, Status
from gascompile.runtime.devices.probe import (
    NO_KVIKIO,
    DeviceMemory,
    Fault,
    GpuFacts,
    device_fault,
    device_memory,
    pinned_fault,
    storage_faults,
)
from gascompile.runtime.transfer.kvikio_path import PathTaken, import_kvikio, path_taken

_LITTLE_SHARE = 0.5
"""With less of its memory free, whoever has the rest is worth a look."""
_PLANS = "; plans for machines with one can be made here: --machine h100-gen5"


def gpu_findings(facts: GpuFacts, io: IoSettings, *, cuda: Any = torch.cuda) -> list[Finding]:
    """Return what was found of the GPU, its memory, KvikIO and GPUDirect Storage.

    Args:
        facts: about this machine.
        io: the settings of reads whose staging has to be pinned.
        cuda: ``torch.cuda``, or what stands in for it.
    """
    fault = device_fault(facts)
    return [
        _gpu(facts, fault),
        _driver(facts),
        _memory(fault, cuda),
        _pinned(facts, io, has_gpu=fault is None),
        *_storage(facts, has_gpu=fault is None),
    ]


def _gpu(facts: GpuFacts, fault: Fault | None) -> Finding:
    if fault is None:
        return Finding(name="gpu", status=Status.OK, detail=", ".join(facts.names))
    detail = f"{fault.cause}: {fault.detail}; models run on the processor"
    remedy = fault.remedy + _PLANS
    return Finding(name="gpu", status=Status.MISSING, detail=detail, remedy=remedy)


def _driver(facts: GpuFacts) -> Finding:
    if facts.driver:
        built = (
            f"torch is built for CUDA {facts.torch_cuda}"
            if facts.torch_cuda
            else "torch has no CUDA"
        )
        return Finding(name="driver", status=Status.OK, detail=f"{facts.driver}, {built}")
    return Finding(
        name="driver",
        status=Status.MISSING,
        detail="no NVIDIA driver is loaded",
        remedy="on a machine with a GPU, install NVIDIA's driver and restart",
    )


def _memory(fault: Fault | None, cuda: Any) -> Finding:
    name = "gpu memory free"
    if fault is not None:
        return Finding(name=name, status=Status.OK, detail="there is no GPU to ask")
    try:
        memory: DeviceMemory = device_memory(cuda=cuda)
    except RuntimeError as error:
        return Finding(
            name=name,
            status=Status.MISSING,
            detail=f"the GPU does not answer: {error}",
            remedy="look at it with nvidia-smi; restart what hangs, or the driver",
        )
    little = memory.free_bytes < _LITTLE_SHARE * memory.total_bytes
    return Finding(
        name=name,
        status=Status.WARN if little else Status.OK,
        detail=f"{format_size(memory.free_bytes)} of {format_size(memory.total_bytes)}; contexts, libraries and "
        f"other processes hold {format_size(memory.others_bytes)}",
        remedy="stop what nvidia-smi lists; without a budget, plans count on what is free"
        if little
        else "",
    )


def _pinned(facts: GpuFacts, io: IoSettings, *, has_gpu: bool) -> Finding:
    name = "pinned memory"
    fault = pinned_fault(facts, io.staging_bytes)
    if fault is not None and has_gpu:
        return Finding(name=name, status=Status.WARN, detail=fault.detail, remedy=fault.remedy)
    limit = facts.memlock_bytes
    most = "any amount" if limit is None else format_size(limit)
    staging = f"reads to a GPU pin {format_size(io.staging_bytes)}"
    use = staging if has_gpu else f"there is no GPU for which {staging}"
    detail = f"this process may lock {most} (ulimit -l); {use}"
    return Finding(name=name, status=Status.OK, detail=detail)


def _storage(facts: GpuFacts, *, has_gpu: bool) -> list[Finding]:
    faults = storage_faults(facts)
    try:
        kvikio = import_kvikio()
    except DeviceError as error:
        missing = str(error).partition(". ")[0]
        others = (fault.detail for fault in faults if fault.cause != NO_KVIKIO)
        lacking = "; ".join((missing, *others))
        remedy = "pip install 'gascompile[gpu]' on a machine with a GPU"
        return [
            Finding(name="kvikio", status=Status.MISSING, detail=missing, remedy=remedy),
            _udev(facts, has_gpu=has_gpu),
            _direct(PathTaken(name="reads through RAM", reason=lacking), faults),
        ]
    taken = path_taken(kvikio, facts)
    mode = getattr(kvikio.defaults.get("compat_mode"), "name", "unknown")
    fine = taken.is_direct
    seen = Finding(
        name="kvikio",
        status=Status.OK if fine else Status.WARN,
        detail=f"{facts.kvikio or 'of an unknown version'}, compatibility mode {mode}: it takes {taken}",
        remedy="" if fine else _remedy(faults),
    )
    return [seen, _udev(facts, has_gpu=has_gpu), _direct(taken, faults)]


def _udev(facts: GpuFacts, *, has_gpu: bool) -> Finding:
    name = "/run/udev"
    fault = next((fault for fault in storage_faults(facts) if fault.cause == "no udev"), None)
    if fault is not None and has_gpu:
        return Finding(name=name, status=Status.WARN, detail=fault.detail, remedy=fault.remedy)
    detail = "cannot be read" if fault is not None else "can be read"
    return Finding(
        name=name, status=Status.OK, detail=f"{detail}; KvikIO needs it for the direct path"
    )


def _direct(taken: PathTaken, faults: tuple[Fault, ...]) -> Finding:
    name = "GPUDirect Storage"
    if taken.is_direct:
        detail = "active: reads go from the drive straight to the GPU"
        return Finding(name=name, status=Status.OK, detail=detail)
    remedy = _remedy(faults)
    return Finding(
        name=name, status=Status.MISSING, detail=f"not active: {taken.reason}", remedy=remedy
    )


def _remedy(faults: tuple[Fault, ...]) -> str:
    remedies = "; ".join(fault.remedy for fault in faults)
    unset = "unset KVIKIO_COMPAT_MODE, and look at what /usr/local/cuda/gds/tools/gdscheck -p says"
    return f"without it, reads go through RAM: {remedies or unset}"
