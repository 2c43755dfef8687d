"""Costs: what facts of a program's ops are as ops and tensors of a workload. No torch in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gascompile.core.machine import Machine, PlaceKind
from gascompile.core.workload import Forms, OpSpec, TensorKind, TensorSpec
from gascompile.cost_models.formulas.op_time import decoding_bytes, op_time_s
from gascompile.passes.graph.facts import Facts, LeafOp, OpFacts

_CALL = LeafOp(target="", flops=0, read_bytes=0, write_bytes=0, dtype="bool", known=True)
"""What an op without a kernel costs, such as a view: the call."""


def op_spec(
    op: OpFacts,
    states: Collection[str],
    device: str,
    machine: Machine,
    splits: Mapping[str, int],
    gathers: Mapping[str, int],
) -> OpSpec:
    """Return an op with its seconds on a device; ``splits`` and ``gathers`` are the spec's."""
    return OpSpec(
        name=op.name,
        time_s={device: time_s(op, device, machine)},
        reads=tuple(op.reads),
        writes=tuple(op.writes),
        patches={name: size for name, size in op.patches.items() if name in states},
        workspace_bytes=op.workspace_bytes,
        flops=sum(leaf.flops for leaf in op.leaves),
        read_bytes=sum(leaf.read_bytes for leaf in op.leaves),
        write_bytes=sum(leaf.write_bytes for leaf in op.leaves),
        splits=splits,
        gathers=gathers,
    )


def time_s(op: OpFacts, device: str, machine: Machine) -> float:
    """Return the seconds of an op on a device, kernel by kernel."""
    is_gpu = machine.tiers[device].kind is PlaceKind.GPU
    return sum(
        op_time_s(
            flops=leaf.flops,
            read_bytes=leaf.read_bytes + _decoding_bytes(leaf, is_gpu=is_gpu),
            write_bytes=leaf.write_bytes,
            dtype=leaf.dtype,
            device=device,
            machine=machine,
        )
        for leaf in op.leaves or (_CALL,)
    )


def _decoding_bytes(leaf: LeafOp, *, is_gpu: bool) -> int:
    if leaf.decoded is None:
        return 0
    form, num_weights, rows = leaf.decoded
    return round(decoding_bytes(num_weights, form, is_gpu=is_gpu, rows=rows))


def tensor_specs(
    facts: Facts,
    *,
    inputs: Collection[str],
    bound: Collection[str],
    states: Collection[str],
    forms: Mapping[str, Forms],
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a workload; all but ``forms`` are names of them, those of inputs with their ``%``."""
    specs = []
    for name, size_bytes in facts.size_bytes.items():
        if name in states:
            kind = TensorKind.STATE
        elif name in bound:
            kind = TensorKind.WEIGHT
        elif name in inputs:
            kind = TensorKind.INPUT
        else:
            kind = TensorKind.OUTPUT if name in facts.outputs else TensorKind.ACTIVATION
        form = forms.get(name)
        specs.append(TensorSpec(name=name, size_bytes=size_bytes, kind=kind, forms=form))
    return tuple(specs)
