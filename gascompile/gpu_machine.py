"""This machine's GPU: whether there is one to compute on, and what it reaches, measured with every engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from gascompile.cost_models.measure import Effort, Stage
from gascompile.cost_models.measure_disk import BUFFER_BYTES, Reader, probe_file
from gascompile.cost_models.measure_gpu import (
    READS,
    EngineFigures,
    gpu_machine,
    measure_engine,
    measure_gpu,
)
from gascompile.errors import DeviceError
from gascompile.ir import Machine
from gascompile.runtime.probe import GpuFacts, device_fault, device_memory, look, storage_faults
from gascompile.units import MIB, format_size

_log = logging.getLogger(__name__)

_KVIKIO = "kvikio"
_STEP_BYTES = 256 * MIB
"""Free memory counts in such steps, so that a plan is not made again for every little change of it."""


def usable_gpu() -> str:
    """Return the name of the GPU that plans for this machine compute on; empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name())


def with_gpu(
    host: Machine, folder: Path, read: Reader, effort: Effort, stage: Stage = lambda name: None
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
    from gascompile.cost_models.cuda_timer import CudaTimer, StagedReader, rows_for

    num_repeats = max(effort.num_calls, 5)
    try:
        stage("GPU")
        with CudaTimer() as timer:
            figures = measure_gpu(timer, rows=rows_for(effort.name), num_repeats=num_repeats)
        stage("reads to the GPU")
        readers: dict[str, Reader] = {READS: StagedReader(read, BUFFER_BYTES)}
        readers |= _kvikio_reader(facts)
        with probe_file(folder, most_bytes=effort.file_bytes) as file:
            engines = [
                measure_engine(name, file, reader, limit_s=effort.disk_limit_s)
                for name, reader in readers.items()
            ]
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU has too little free memory to be measured: {error}; stop what nvidia-smi lists",
            cause="device memory",
        ) from error
    _say_what_is_missing(facts, engines)
    return gpu_machine(host, figures, engines, effort=effort.name)


def _kvikio_reader(facts: GpuFacts) -> dict[str, Reader]:
    """Return the reader of KvikIO by its name; none where it is not installed or does not load."""
    from gascompile.runtime.kvikio_engine import DeviceReader

    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    try:
        return {_KVIKIO: DeviceReader(target, facts)}
    except DeviceError as error:
        _log.warning("%s", error)
        return {}


def _say_what_is_missing(facts: GpuFacts, engines: list[EngineFigures]) -> None:
    """Log once, with the measurement, why reads do not go straight to the GPU."""
    faults = storage_faults(facts)
    if faults:
        _log.warning(
            "reads to the GPU go through RAM: %s (measured: %s)",
            "; ".join(f"{fault.detail}: {fault.remedy}" for fault in faults),
            ", ".join(f"{e.io.engine} {e.bytes_per_s / 1e9:.1f} GB/s" for e in engines),
        )


def with_free_memory(machine: Machine) -> Machine:
    """Give the GPU's tier what is free of it now: a plan without a budget must not count on the rest."""
    tier = machine.tiers.get("gpu")
    if tier is None:
        return machine
    found = device_memory()
    usable_bytes = (found.free_bytes + found.own_bytes) // _STEP_BYTES * _STEP_BYTES
    if usable_bytes >= tier.size_bytes:
        return machine
    taken_bytes = max(found.total_bytes - found.free_bytes - found.own_bytes, 0)
    note = f"{format_size(taken_bytes)} held by contexts, libraries and other processes"
    now = replace(tier, size_bytes=usable_bytes, source=f"{tier.source}; {note}")
    return replace(machine, tiers={**machine.tiers, "gpu": now})
