"""Seconds of a program's ops as this machine runs them, measured once per kind of op and remembered.

They lie beside the remembered machine and go with it: a new calibration forgets them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gascompile.capture.torch_settings import cast_suffix
from gascompile.codegen.fuse import has_other_products
from gascompile.codegen.packed_kernels import use_packed_kernels
from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.errors import StorageError
from gascompile.core.machine import Machine
from gascompile.core.program import Program
from gascompile.core.remembered import remembered
from gascompile.core.workload import Workload
from gascompile.cost_models.measure.compute import op_overhead_s
from gascompile.cost_models.measure.op_memory import OpCall
from gascompile.cost_models.measure.ops import measure_ops, signature
from gascompile.machines.busy import warned_if_busy
from gascompile.machines.device_calls import calls_of, device_ops, on_device
from gascompile.machines.emulated import emulated_name
from gascompile.machines.resolve import host_name, op_times_path, this_machine_name
from gascompile.passes.graph.retime import retime
from gascompile.runtime.devices.probe import usable_gpu
from gascompile.runtime.kernels.onednn import linear
from gascompile.runtime.memory.early_memory import no_pages_taken

_log = logging.getLogger(__name__)

_FORMAT = "gascompile.op_times/1"
_WORTH_S = 0.002
"""A program that runs for less is planned by formulas: measuring would take longer than it saves."""
_LIMIT_S = 2.0
"""For the measurements of one program."""
_PRODUCTS = {torch.ops.aten.linear.default: linear}


def measured_times(
    program: Program,
    workload: Workload,
    machine: Machine,
    cache_dir: Path,
    *,
    onednn: bool = False,
) -> Mapping[str, float]:
    """Return seconds by op name: those that count most of ``workload``, where ``machine`` is this one.

    The first plan of a program takes up to three seconds to measure them and 128 MiB of memory meanwhile; on a GPU
    as much of its memory as an op's inputs and results take, or 128 MiB of inputs if they are less. With ``onednn``
    large products are that library's.

    Raises:
        StorageError: ``cache_dir`` cannot be made.
    """
    if machine.compute_backend != "cuda":
        # What is measured is what will run.
        use_packed_kernels(program.forms, cache_dir, make=True)
    tier = machine.compute_tier
    total_s = sum(op.time_s[tier] for op in workload.ops)
    on_gpu = computes_on_gpu(machine)
    if not (on_gpu or computes_here(machine)) or total_s < _WORTH_S:
        return {}
    nodes = dict(zip((op.name for op in workload.ops), program.op_nodes(), strict=True))
    costly = sorted(workload.ops, key=lambda op: -op.time_s[tier])
    kinds = {op.name: signature(nodes[op.name], program) for op in costly}
    if on_gpu:
        calls = calls_of(nodes[op.name] for op in costly)
        called = {op: kind for op, kind in kinds.items() if kind is not None}
        return device_times(called, calls, machine, cache_dir)
    casts = cast_suffix() + " onednn" * onednn
    names = {op: f"{kind}{casts}" for op, kind in kinds.items() if kind is not None}
    path = op_times_path(cache_dir)
    known = remembered(path, _FORMAT, "the remembered op times", _seconds) or {}
    missing = [nodes[op] for op, name in names.items() if name not in known]
    if missing:
        with warned_if_busy("this model"), no_pages_taken():
            measured = measure_ops(
                missing, program, limit_s=_LIMIT_S, in_place_of=_PRODUCTS if onednn else {}
            )
        new = {f"{kind}{casts}": time_s for kind, time_s in measured.items()}
        known = {**known, **new}
        _keep(known, path, new)
    # What calling from a plan costs beyond calling from a loop was fitted on a run.
    called_s = sum(rate.op_overhead_s for rate in machine.memory if rate.device == tier)
    beyond_s = max(called_s - op_overhead_s(), 0.0)
    return {op: known[name] + beyond_s for op, name in names.items() if name in known}


def device_times(
    kinds: Mapping[str, str], calls: Mapping[str, OpCall], machine: Machine, cache_dir: Path
) -> dict[str, float]:
    """Return seconds by op on this machine's GPU, of those it can be given; what is not known is measured there.

    Args:
        kinds: what the seconds of each op depend on, by its name; those that count most come first.
        calls: the ops themselves.
        machine: this one, with its GPU.
        cache_dir: where figures are remembered.

    Raises:
        StorageError: ``cache_dir`` cannot be made.
    """
    # Which kernel computes a product depends on how exact it has to be.
    where = f"{cast_suffix()} precision={torch.get_float32_matmul_precision()} on the GPU"
    names = {op: f"{kind}{where}" for op, kind in kinds.items()}
    path = op_times_path(cache_dir)
    known = remembered(path, _FORMAT, "the remembered op times", _seconds) or {}
    missing = {names[op]: calls[op] for op in kinds if op in calls and names[op] not in known}
    if missing:
        new: dict[str, float] = {}
        with device_ops() as ops:
            stop = time.perf_counter() + _LIMIT_S
            for name, call in missing.items():
                if time.perf_counter() > stop:
                    break
                time_s = ops.time_s(on_device(call, ops.device))
                if time_s is not None:
                    new[name] = time_s
        known = {**known, **new}
        _keep(known, path, new)
    # A GPU computes while the host calls the next op.
    tier = machine.compute_tier
    called_s = sum(rate.op_overhead_s for rate in machine.memory if rate.device == tier)
    return {op: max(known[name], called_s) for op, name in names.items() if name in known}


def _keep(known: Mapping[str, float], path: Path, new: Mapping[str, float]) -> None:
    if new:
        keep_times(path, json.dumps({"format": _FORMAT, "seconds": known}, indent=1))


def retimed(
    program: Program, workload: Workload, machine: Machine, config: CompileConfig
) -> Workload:
    """Return ``workload`` with the seconds that this machine was measured to take for its ops.

    Raises:
        StorageError: the cache folder cannot be made.
    """
    onednn = has_other_products(config, machine)
    times_s = measured_times(program, workload, machine, config.cache_dir, onednn=onednn)
    if machine.compute_backend == "emulated":
        # Its processor is the host's own.
        workload = retime(workload, times_s, device="cpu", added=False)
    return retime(workload, times_s, device=machine.compute_tier)


def keep_times(path: Path, text: str) -> None:
    """Write measured times to ``path``; a disk that cannot keep them costs the next plan, not this one."""
    try:
        serial.write_atomic(path, text + "\n")
    except StorageError as error:
        _log.warning(
            "measured times are not kept, and are measured again for the next plan: %s", error
        )


def computes_here(machine: Machine) -> bool:
    """Return whether it is this processor that runs the ops: as itself, or as the emulated accelerator."""
    match machine.compute_backend:
        case "cpu":
            return machine.name == this_machine_name()
        case "emulated":
            return machine.name == emulated_name(host_name())
        case _:
            return False


def computes_on_gpu(machine: Machine) -> bool:
    """Return whether it is this machine's own GPU that runs the ops, and torch can use it now."""
    if machine.compute_backend != "cuda" or not usable_gpu():
        return False
    return machine.name == this_machine_name()


def _seconds(data: Any) -> Mapping[str, float]:
    return {str(name): float(time_s) for name, time_s in data["seconds"].items()}
