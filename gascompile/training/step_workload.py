"""Step workload: the planning problem of a training step."""

from __future__ import annotations

from dataclasses import replace

from gascompile.ir import Machine, TensorKind, TensorSpec, Workload
from gascompile.passes.annotate import annotate
from gascompile.training.step_program import RANDOM, StepProgram, is_random


def step_workload(program: StepProgram, machine: Machine) -> Workload:
    """Return the planning problem of a step: parameters that change, moments, and a source of random numbers."""
    found = annotate(program.program, machine).workload
    nodes = {node.name: node for node in program.program.op_nodes()}
    drawing = {op.name for op in found.ops if is_random(nodes[op.name])}
    ops = tuple(
        replace(op, writes=(*op.writes, RANDOM)) if op.name in drawing else op for op in found.ops
    )
    # What the program changes is moved like a weight: the plan decides, not its kind.
    tensors = tuple(
        replace(t, kind=TensorKind.WEIGHT)
        if t.kind is TensorKind.STATE and t.name not in program.tiles
        else t
        for t in found.tensors
    )
    if drawing:
        tensors = (*tensors, TensorSpec(name=RANDOM, size_bytes=0, kind=TensorKind.INPUT))
    return replace(found, ops=ops, tensors=tensors)
