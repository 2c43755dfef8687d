"""What ops really allocate beside their results, where no formula says: measured, or learnt from runs; remembered.

Formulas are of the processor's kernels: on this machine's GPU every kind of op is measured. A plan reserves the most
that formulas, measurements and runs know. What runs teach makes cached plans outdated.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from gascompile.bundles.bundle import Bundle
from gascompile.capture.torch_settings import cast_suffix, has_autocast
from gascompile.codegen.fuse import has_other_products
from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.errors import BudgetExceededError, FormatError, StorageError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.program import Program, op_name
from gascompile.core.tiles import base_name
from gascompile.core.workload import Workload
from gascompile.runtime.kernels import onednn

if TYPE_CHECKING:
    from gascompile.cost_models.measure.op_memory import OpCall
    from gascompile.passes.graph.annotate import Annotation

_log = logging.getLogger("gascompile")

_FORMAT = "gascompile.op_memory/1"
_FILE = "op_memory.json"
_SMALL_BYTES = 256
"""Of scalars."""
_LIMIT_S = 2.0
"""For the measurements of one program."""
_DEVICE_LIMIT_S = 5.0
"""For those on a GPU, where the first call of each kernel loads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Bytes by kind of op, on this processor and on GPUs, with this torch."""

    measured: Mapping[str, int] = field(default_factory=dict)
    learnt: Mapping[str, int] = field(default_factory=dict)
    """From runs that were stopped: what an op had asked for, results included."""

    def bytes(self, kind: str) -> int:
        return max(self.measured.get(kind, 0), self.learnt.get(kind, 0))


def build_counter(machine: Machine, cache_dir: Path) -> None:
    """Have what counts memory compiled while a program is captured; ``annotate_memory`` waits for it."""
    from gascompile.codegen.allocator_library import begin_building
    from gascompile.machines.op_times import computes_here

    if computes_here(machine):
        begin_building(cache_dir)


def annotate_memory(
    program: Program,
    machine: Machine,
    config: CompileConfig,
    *,
    sites: Sequence[str] = (),
    parts: bool = False,
) -> Annotation:
    """Annotate ``program`` with the workspace that its ops are known to take on this processor, or on its GPU.

    Under an autocast all ops stay on the tier that computes, whatever ``sites`` there are.

    What no formula bounds is measured on made-up values: up to two seconds and 256 MiB, once per kind of op. On a
    GPU all ops are: up to five seconds and 4 GiB, and no more than half of the memory that is free there.
    """
    from gascompile.codegen.allocator_library import await_building
    from gascompile.machines.op_times import computes_here, computes_on_gpu
    from gascompile.passes.graph.annotate import annotate

    # An autocast is of one thread alone.
    if has_autocast():
        sites, parts = (), False
    annotation = annotate(program, machine, sites=sites, parts=parts)
    if computes_on_gpu(machine):
        sizes = device_bytes(annotation.kinds, annotation.calls, machine, config.cache_dir)
        return replace(annotation, workload=reserving(annotation.workload, sizes))
    if not computes_here(machine):
        return annotation
    # Ops are timed from here on, which no compiler may disturb.
    await_building()
    known = _with_measured(annotation, machine, config.cache_dir)
    sizes = {op: known.bytes(_kind(annotation.kinds, op, machine)) for op in annotation.kinds}
    if has_other_products(config, machine):
        _add_products(sizes, program)
    return replace(annotation, workload=reserving(annotation.workload, sizes))


def device_bytes(
    kinds: Mapping[str, str], calls: Mapping[str, OpCall], machine: Machine, cache_dir: Path
) -> dict[str, int]:
    """Return the bytes by op that are known of ``kinds`` on this machine's GPU; those missing are measured there.

    Ops that the GPU refuses, or has no memory for, are left out: formulas have to do.

    Args:
        kinds: what the workspace of each op depends on, by its name.
        calls: the ops themselves.
        machine: this one, with its GPU.
        cache_dir: where figures are remembered.
    """
    from gascompile.machines.device_calls import device_ops, on_device

    known = _read(cache_dir)
    names = {op: _kind(kinds, op, machine) for op in kinds}
    missing = {names[op]: call for op, call in calls.items() if names.get(op)}
    # Last those whose kernels may have to be compiled first.
    calls_of_torch_first = sorted(missing.items(), key=lambda item: not _is_of_torch(item[1]))
    missing = {kind: call for kind, call in calls_of_torch_first if kind not in known.measured}
    if missing:
        with device_ops() as ops:
            known = _measuring(
                known,
                missing,
                lambda call: ops.workspace_bytes(on_device(call, ops.device)),
                limit_s=_DEVICE_LIMIT_S,
                cache_dir=cache_dir,
            )
    return {op: known.bytes(name) for op, name in names.items()}


def _is_of_torch(call: OpCall) -> bool:
    return str(call.function).startswith("aten")


def reserving(workload: Workload, sizes: Mapping[str, int]) -> Workload:
    """Return ``workload`` with workspaces of at least the bytes in ``sizes``, by op."""
    ops = tuple(
        replace(op, workspace_bytes=max(op.workspace_bytes, sizes.get(op.name, 0)))
        for op in workload.ops
    )
    return replace(workload, ops=ops)


def _add_products(sizes: dict[str, int], program: Program) -> None:
    """Add what oneDNN's products take to the bytes by op."""
    size_bytes = onednn.scratch_bytes()
    for node in program.op_nodes():
        if _is_large_product(node):
            sizes[op_name(node)] = max(sizes.get(op_name(node), 0), size_bytes)


def _is_large_product(node: fx.Node) -> bool:
    weight = node.args[1] if node.target is torch.ops.aten.linear.default else None
    value = weight.meta.get("val") if isinstance(weight, fx.Node) else None
    return isinstance(value, torch.Tensor) and onednn.takes(value)


def unknown_ops(annotation: Annotation, machine: Machine, cache_dir: Path) -> tuple[str, ...]:
    """Return a line per op whose cost no formula covers, and one for those whose memory nothing does."""
    from gascompile.machines.op_times import computes_here

    warnings = tuple(
        f"no cost formula for {name}: only the bytes it touches are counted"
        for name in annotation.unknown_ops
    )
    if not computes_here(machine):
        return warnings
    known = _read(cache_dir)
    missing = {
        str(call.function)
        for op, call in annotation.unproven.items()
        if _kind(annotation.kinds, op, machine) not in {*known.measured, *known.learnt}
    }
    if missing:
        names = ", ".join(sorted(missing))
        warnings += (f"what {names} take beside results is not known: a run too large is stopped",)
    return warnings


def remember(program: Program, plan: Plan, error: BudgetExceededError, cache_dir: Path) -> bool:
    """Keep what a stopped run of ``plan`` taught about its op for the next one; False where it taught nothing."""
    from gascompile.passes.graph.annotate import annotate

    kind = _kind(annotate(program, plan.machine).kinds, error.op, plan.machine)
    if not kind:
        return False
    learn(kind, plan, error, cache_dir)
    return True


def learn(kind: str, plan: Plan, error: BudgetExceededError, cache_dir: Path) -> None:
    """Keep what a kind of op was found to ask for in a run of ``plan`` that was stopped."""
    reserved = {op.name: op.workspace_bytes for op in plan.workload.ops}.get(error.op, 0)
    known = _read(cache_dir)
    before = known.learnt.get(kind, 0)
    # It was stopped at the first block too many: more may follow, a little at first. An older plan, which has less than
    # is known by now, says nothing about that.
    least_bytes = before * 3 // 2 if reserved >= before else before
    size_bytes = max(error.real_bytes * 9 // 8 + _SMALL_BYTES, least_bytes)
    _write(replace(known, learnt={**known.learnt, kind: size_bytes}), cache_dir)


def learnt_bytes(cache_dir: Path) -> Mapping[str, int]:
    """Return what runs that were stopped have taught, by kind of op."""
    return _read(cache_dir).learnt


def lacks_memory(bundle: Bundle, *, cache_dir: Path) -> str:
    """Return why a kept plan is to be made again: runs have taught more about an op than it reserves; else empty."""
    learnt = _read(cache_dir).learnt
    targets = {str(node.target) for node in bundle.program.op_nodes()}
    if not any(kind.split(" ", 1)[0] in targets for kind in learnt):
        return ""
    from gascompile.passes.graph.annotate import annotate

    plan = bundle.plan
    kinds = annotate(bundle.program, plan.machine).kinds
    for op in plan.workload.ops:
        if learnt.get(_kind(kinds, op.name, plan.machine), 0) > op.workspace_bytes:
            return f"op '{op.name}' was found to take more than it reserves"
    return ""


def _kind(kinds: Mapping[str, str], op: str, machine: Machine) -> str:
    """Return what an op's workspace depends on; per-thread buffers are part of it, and whose kernels run."""
    kind = kinds.get(base_name(op))
    if not kind:
        return ""
    where = f"threads={torch.get_num_threads()}"
    if machine.compute_backend == "cuda":
        # Which kernel computes a product depends on how exact it has to be.
        where = f"on {machine.name} precision={torch.get_float32_matmul_precision()}"
    return f"{kind} {where}{cast_suffix()}"


def _with_measured(annotation: Annotation, machine: Machine, cache_dir: Path) -> _Known:
    from gascompile.codegen.allocator_library import allocation_counter
    from gascompile.cost_models.measure.op_memory import measured_workspace_bytes

    known = _read(cache_dir)
    counter = allocation_counter(cache_dir) if annotation.unproven else None
    if counter is None:
        return known
    calls: dict[str, OpCall] = {}
    for op, call in annotation.unproven.items():
        kind = _kind(annotation.kinds, op, machine)
        if kind not in known.measured:
            calls.setdefault(kind, call)
    return _measuring(
        known,
        calls,
        lambda call: measured_workspace_bytes(call, counter),
        limit_s=_LIMIT_S,
        cache_dir=cache_dir,
    )


def _measuring(
    known: _Known,
    calls: Mapping[str, OpCall],
    measure: Callable[[OpCall], int | None],
    *,
    limit_s: float,
    cache_dir: Path,
) -> _Known:
    """Return what is known with what ``measure`` finds of ``calls``, by kind, until the time is over; keep it."""
    new: dict[str, int] = {}
    stop = time.perf_counter() + limit_s
    for kind, call in calls.items():
        if time.perf_counter() > stop:
            break
        size_bytes = measure(call)
        if size_bytes is not None:
            new[kind] = size_bytes
    if not new:
        return known
    known = replace(known, measured={**known.measured, **new})
    _write(known, cache_dir)
    return known


def _made_for() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _read(cache_dir: Path) -> _Known:
    path = cache_dir / _FILE
    try:
        if not os.path.exists(path):
            return _Known()
        data = serial.read_json(path)
        if data["format"] != _FORMAT or data["made_for"] != _made_for():
            return _Known()
        return _Known(measured=dict(_sizes(data["measured"])), learnt=dict(_sizes(data["learnt"])))
    except (FormatError, StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the remembered memory of ops %s is damaged and made again: %s", path, error)
        return _Known()


def _sizes(data: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for kind, size_bytes in data.items():
        if not isinstance(size_bytes, int) or not 0 <= size_bytes < 1 << 62:
            raise ValueError(f"{size_bytes!r:.40} is no number of bytes")
        yield kind, size_bytes


def _write(known: _Known, cache_dir: Path) -> None:
    data = {
        "format": _FORMAT,
        "made_for": _made_for(),
        "measured": known.measured,
        "learnt": known.learnt,
    }
    try:
        serial.write_atomic(cache_dir / _FILE, json.dumps(data, indent=1) + "\n")
    except StorageError as error:
        _log.warning("what ops allocate is not kept, and is measured again: %s", error)
