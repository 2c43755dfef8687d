"""This machine's GPU: whether there is one to compute on, and what it reaches, measured with every engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gascompile.core.errors import DeviceError
from gascompile.core.machine import Machine
from gascompile.core.sizes import MIB, format_size
from gascompile.cost_models.measure.disk import BUFFER_BYTES, ProbeReader, probe_file
from gascompile.cost_models.measure.gpu import (
    READS,
    EngineFigures,
    GpuTimer,
    gpu_machine,
    measure_engine,
    measure_gpu,
)
from gascompile.cost_models.measure.machine import MeasuringEffort, Stage
from gascompile.runtime.devices.probe import (
    DEVICE_MEMORY,
    GpuFacts,
    device_fault,
    device_memory,
    look,
    storage_faults,
)

_log = logging.getLogger(__name__)

_KVIKIO = "kvikio"
_STEP_BYTES = 256 * MIB
"""Free memory counts in such steps, so that a plan is not made again for every little change of it."""


def with_gpu(
    host: Machine,
    folder: Path,
    read: ProbeReader,
    effort: MeasuringEffort,
    stage: Stage = lambda name: None,
) -> Machine:
    """Return ``host`` with this machine's GPU, measured; ``host`` itself where there is none to use.

    Takes a few seconds, and writes a temporary file into ``folder``.

    Raises:
        DeviceError: the GPU is there and gives up, or its memory is taken.
        StorageError: ``folder`` cannot be written to.
    """
    facts = look()
    if device_fault(facts) is not None:
        return host
    from gascompile.cost_models.measure.cuda_timer import CudaTimer

    try:
        with CudaTimer() as timer:
            readers = gpu_readers(read, facts)
            return measured(host, folder, effort, timer, readers, facts=facts, stage=stage)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU has too little free memory to be measured: {error}; stop what nvidia-smi lists",
            cause=DEVICE_MEMORY,
        ) from error


def measured(
    host: Machine,
    folder: Path,
    effort: MeasuringEffort,
    timer: GpuTimer,
    readers: Mapping[str, ProbeReader],
    *,
    facts: GpuFacts,
    stage: Stage = lambda name: None,
) -> Machine:
    """Return ``host`` with the GPU behind ``timer``, and the fastest of ``readers`` to bring bytes to it.

    Args:
        host: the processor, its memory and its drive, measured.
        folder: on the file system that counts; a temporary file is written there.
        effort: how long to measure.
        timer: of the GPU.
        readers: what brings bytes of a file to it, by the name of the engine.
        facts: for the log, where reads do not go straight to the GPU.
        stage: told what is done next.
    """
    from gascompile.cost_models.measure.cuda_timer import rows_for

    stage("GPU")
    num_repeats = max(effort.num_calls, 5)
    figures = measure_gpu(timer, rows=rows_for(effort.name), num_repeats=num_repeats)
    stage("reads to the GPU")
    with probe_file(folder, most_bytes=effort.file_bytes) as file:
        engines = [
            measure_engine(name, file, reader, limit_s=effort.disk_limit_s)
            for name, reader in readers.items()
        ]
    _say_what_is_missing(facts, engines)
    return gpu_machine(host, figures, engines, effort=effort.name)


def gpu_readers(
    read: ProbeReader, facts: GpuFacts, *, cuda: Any = torch.cuda, device: str = "cuda"
) -> dict[str, ProbeReader]:
    """Return what can bring bytes of a file to the GPU, as the runtime would, by the name of the engine.

    KvikIO reads to the device where GPUDirect Storage is active, else into pinned memory that is copied from
    while the next part is read. It is left out, with a warning, where it is not installed or does not load.

    Args:
        read: aligned reads into memory of the host.
        facts: about this machine.
        cuda: ``torch.cuda``, or what stands in for it.
        device: its device.
    """
    from gascompile.cost_models.measure.cuda_timer import StagedReader
    from gascompile.runtime.transfer.kvikio_path import TimedReader

    def staged(reader: ProbeReader) -> ProbeReader:
        return StagedReader(reader, BUFFER_BYTES, cuda, device=device)

    readers: dict[str, ProbeReader] = {READS: staged(read)}
    try:
        target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        kvikio = TimedReader(target, facts)
    except DeviceError as error:
        _log.warning("%s", error)
        return readers
    return {**readers, _KVIKIO: kvikio if kvikio.path.is_direct else staged(kvikio)}


def _say_what_is_missing(facts: GpuFacts, engines: list[EngineFigures]) -> None:
    """Log once, with the measurement, why reads do not go straight to the GPU."""
    faults = storage_faults(facts)
    if faults:
        _log.warning(
            "reads to the GPU go through RAM: %s (measured: %s)",
            "; ".join(f"{fault.detail}: {fault.remedy}" for fault in faults),
            ", ".join(f"{e.io.engine} {e.bytes_per_s / 1e9:.1f} GB/s" for e in engines),
        )


def with_free_memory(machine: Machine, *, cuda: Any = torch.cuda) -> Machine:
    """Give the GPU's tier what is free of it now: a plan without a budget must not count on the rest."""
    tier = machine.tiers.get("gpu")
    if tier is None:
        return machine
    memory = device_memory(cuda=cuda)
    usable_bytes = (memory.free_bytes + memory.own_bytes) // _STEP_BYTES * _STEP_BYTES
    if usable_bytes >= tier.size_bytes:
        return machine
    note = f"{format_size(memory.others_bytes)} held by contexts, libraries and other processes"
    now = replace(tier, size_bytes=usable_bytes, source=f"{tier.source}; {note}")
    return machine.with_place(now)
