"""Checks that the parts of a bundle are of one model: its program, its plan, its weights and its held tensors.

Each part may be right by itself and lie about the others: a plan that reserves 512 bytes for an op that makes
gigabytes, a weight of other bytes than its shape has. So the program is run on fake tensors, as it was when it was
planned, and what comes out must be the plan's own workload; only seconds may differ, which were measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import torch

from gascompile.bundles.bundle import Bundle
from gascompile.capture.fingerprint.fingerprint import made_by
from gascompile.core.errors import (
    CheckpointError,
    PlanMismatchError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.own_files import is_own, own_cache
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.core.serial import write_atomic
from gascompile.core.sizes import format_size
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.core.workload import OpSpec, TensorSpec, Workload
from gascompile.cost_models.measure.host import memory_limit
from gascompile.formats.layout import is_packed
from gascompile.passes.graph.annotate import annotate
from gascompile.passes.graph.divide import divide, division_of
from gascompile.passes.graph.order_graph import same_order


def check_bundle(bundle: Bundle, cache_dir: Path) -> None:
    """Return if the plan of ``bundle`` was made for its program, and this machine has room for it.

    What was found right once, or was made here, is not run on fake tensors again: that takes a second, most of it
    to import what does it.

    Raises:
        PlanMismatchError: names the op or tensor and both figures.
        UnsupportedOpError: an op of the program cannot run on fake tensors.
    """
    _check_room(bundle.plan)
    if bundle.digest and is_own(_note(bundle.digest, cache_dir)):
        return
    check_program_of(bundle.plan, bundle.program)
    note_checked(bundle.digest, cache_dir)


def note_checked(digest: str, cache_dir: Path) -> None:
    """Remember that the program and the plan of this digest are of one model."""
    path = _note(digest, cache_dir)
    with contextlib.suppress(StorageError):  # then it is checked again
        own_cache(path.parent)
        write_atomic(path, "")


def _note(digest: str, cache_dir: Path) -> Path:
    return cache_dir / "checked" / f"{digest}-{made_by()[:16]}"


def check_program_of(plan: Plan, program: Program) -> None:
    """Return if ``plan`` was made for ``program``, by what its ops really read, write and allocate.

    Raises:
        PlanMismatchError: names the op or tensor and both figures.
        UnsupportedOpError: an op of the program cannot run on fake tensors.
    """
    division = replace(division_of(plan.workload), gather_tier="")
    repeats, parts = plan.workload.repeats, bool(division.cuts)
    expected = annotate(program, plan.machine, repeats=repeats, parts=parts).workload
    expected = _as_ordered(divide(expected, plan.machine, division), plan)
    check_workload(plan.workload, expected)
    _check_strides(program, expected)


def _as_ordered(workload: Workload, plan: Plan) -> Workload:
    """Return a workload with its ops in the order of a plan, where they may run in it."""
    ops = {op.name: op for op in workload.ops}
    sites = {op.name: op.site for op in plan.ops}
    if not same_order(list(ops), sites, plan.machine.compute_tier):
        return workload
    return replace(workload, ops=tuple(ops[name] for name in sites))


def check_workload(planned: Workload, expected: Workload, *, measured: bool = False) -> None:
    """Return if a planned workload is that of its program.

    Args:
        planned: of the plan.
        expected: as the program has it.
        measured: workspace was seen here, and may be less than formulas say.

    Raises:
        PlanMismatchError: names the op or tensor and both figures.
    """
    _check_tensors(planned.tensors, expected.tensors)
    for given, wanted in zip_longest(planned.ops, expected.ops):
        if given is None or wanted is None:
            _refuse(f"the program has {len(expected.ops)} ops, the plan {len(planned.ops)}")
        _check_op(given, wanted, least_bytes=0 if measured else wanted.workspace_bytes)


def _check_tensors(given: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> None:
    known = {tensor.name: tensor for tensor in given}
    for tensor in wanted:
        planned = known.pop(tensor.name, None)
        if planned is None:
            _refuse(f"the plan lacks the tensor '{tensor.name}' of the program")
        if planned.size_bytes != tensor.size_bytes or planned.kind != tensor.kind:
            _refuse(
                f"'{tensor.name}' is a {tensor.kind} of {tensor.size_bytes} bytes in the program, a {planned.kind} of "
                f"{planned.size_bytes} in the plan"
            )
        if planned.forms != tensor.forms:
            _refuse(f"'{tensor.name}' moves in another form in the program than in the plan")
    for name in known:
        _refuse(f"the plan has a tensor {name!a}, which the program has not")


def _check_op(given: OpSpec, wanted: OpSpec, *, least_bytes: int) -> None:
    if given.name != wanted.name:
        _refuse(f"the op '{wanted.name}' of the program is {given.name!a} in the plan")
    for what in ("reads", "writes"):
        if set(getattr(given, what)) != set(getattr(wanted, what)):
            _refuse(f"the op '{wanted.name}' {what} other tensors in the program than in the plan")
    if dict(given.gathers) != dict(wanted.gathers):
        _refuse(f"the op '{wanted.name}' needs other rows in the program than in the plan")
    if given.workspace_bytes < least_bytes:
        _refuse(
            f"the op '{wanted.name}' takes {wanted.workspace_bytes} bytes of workspace, the plan reserves "
            f"{given.workspace_bytes}"
        )


def _check_strides(program: Program, workload: Workload) -> None:
    """Refuse views by bare offsets of what shares its storage with others: weights do, in the arena."""
    reads = {op.name: op.reads for op in workload.ops}
    inputs = {f"%{spec.name}" for spec in program.inputs}
    for node in program.op_nodes():
        if node.target is torch.ops.aten.as_strided.default:
            for name in reads.get(node.name, ()):
                if not name.startswith("%") or name in inputs:
                    raise UnsupportedOpError(
                        f"the op '{node.name}' takes a view of '{name}' by a bare offset, which is for results of ops "
                        "alone; write it with slices and transposes"
                    )


def _check_room(plan: Plan) -> None:
    """Refuse a plan that needs more RAM than this machine has, whatever machine it says that it is for."""
    limit = memory_limit()
    needed_bytes = plan.peak_bytes.get("cpu", 0)
    if needed_bytes > limit.size_bytes:
        raise PlanMismatchError(
            f"the plan takes {format_size(needed_bytes)} of RAM, this machine has {format_size(limit.size_bytes)} "
            f"({limit.origin}); compile the model again here"
        )


def check_weights(
    plan: Plan,
    program: Program,
    sources: Mapping[str, WeightSource],
    stamps: Sequence[FileStamp],
    held: Mapping[str, torch.Tensor],
) -> None:
    """Return if every weight and state of ``program`` is there, in its shape and its bytes.

    Raises:
        CheckpointError: one is missing, or lies outside its file, or is another one.
    """
    sizes = {stamp.path: stamp.size_bytes for stamp in stamps}
    for name, bound in program.bound.items():
        if name in held:
            tensor = held[name]
            held_as = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if held_as != (bound.dtype, bound.shape):
                raise _other(name, held_as, bound.dtype, bound.shape)
            continue
        source = sources.get(name)
        if source is None:
            raise CheckpointError(f"the bundle says nowhere where '{name}' lies; save it again")
        form = program.forms.get(name)
        packed = form is not None and is_packed(form.wire)
        if packed:
            wanted_dtypes: tuple[str, ...] = (bound.dtype, form.wire) if form else ()
        else:
            wanted_dtypes = (bound.dtype,)
        if source.size_bytes != bound.size_bytes or source.dtype not in wanted_dtypes:
            raise _other(name, (source.dtype, source.shape), bound.dtype, bound.shape)
        if not packed and (source.shape, source.stride) != (bound.shape, bound.stride or ()):
            raise _other(name, (source.dtype, source.shape), bound.dtype, bound.shape)
        for extent in source.extents:
            end = extent.offset + extent.size_bytes
            if extent.path not in sizes or extent.offset < 0 or extent.size_bytes < 0:
                raise CheckpointError(
                    f"'{name}' lies at {extent.offset} of {ascii(extent.path)[:300]}, none of the bundle's files"
                )
            if end > sizes[extent.path]:
                raise CheckpointError(
                    f"'{name}' ends at byte {end} of {extent.path}, which has {sizes[extent.path]}"
                )
    if lost := program.states - held.keys():
        raise CheckpointError(f"the bundle lacks the values of '{min(lost)}'; save it again")
    if odd := held.keys() - program.bound.keys():
        raise CheckpointError(f"the bundle holds {min(odd)!a}, which its program has not")


def _other(
    name: str, held_as: tuple[str, tuple[int, ...]], dtype: str, shape: tuple[int, ...]
) -> CheckpointError:
    return CheckpointError(
        f"'{name}' is {held_as[0]} of the shape {list(held_as[1])[:8]} in the bundle, its program needs {dtype} of "
        f"{list(shape)[:8]}; save it again"
    )


def _refuse(message: str) -> NoReturn:
    raise PlanMismatchError(f"{message}; the bundle is refused, save it again")
