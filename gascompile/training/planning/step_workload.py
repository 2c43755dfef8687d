"""Step workload: the planning problem of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.machine import Machine
from gascompile.core.program import draws
from gascompile.core.true_strides import true_strides
from gascompile.core.workload import TensorKind, TensorSpec, Workload
from gascompile.passes.graph.annotate import annotate
from gascompile.passes.graph.leaving import is_update
from gascompile.training.optimizers import class_updates, coded_updates, rank_ops, update_ops
from gascompile.training.planning import row_draws
from gascompile.training.planning.step_program import EXCHANGE, RANDOM, StepProgram

_SCALARS_BYTES = 512
"""Results of one element, as the allocator rounds them up."""


def step_workload(
    program: StepProgram, machine: Machine, *, traced: bool = True, sites: Sequence[str] = ()
) -> Workload:
    """Return the planning problem of a step: parameters that change, moments, and a source of random numbers.

    Args:
        program: of the step.
        machine: where it runs.
        traced: False for a program from a file, of whose updates the workspace is not known.
        sites: other tiers whose processors may run updates.
    """
    with true_strides():
        annotated = annotate(program.program, machine, sites=sites).workload
    nodes = {node.name: node for node in program.program.op_nodes()}
    own = machine.compute_tier
    drawing = {op.name for op in annotated.ops if draws(nodes[op.name].target)}
    exchanging = {op.name for op in annotated.ops if rank_ops.exchanges(nodes[op.name].target)}
    ops = tuple(
        replace(
            op,
            time_s=op.time_s if is_update(nodes[op.name]) else {own: op.time_s[own]},
            writes=(
                *op.writes,
                *([RANDOM] if op.name in drawing else []),
                *([EXCHANGE] if op.name in exchanging else []),
            ),
            workspace_bytes=op.workspace_bytes + (_own_bytes(nodes[op.name]) if traced else 0),
        )
        for op in annotated.ops
    )
    moments = {name for name, tile in program.tiles.items() if not tile.is_part}
    # What the program changes is moved like a weight: the plan decides, not its kind.
    tensors = tuple(
        replace(t, kind=TensorKind.WEIGHT)
        if t.kind is TensorKind.STATE and t.name not in moments
        else t
        for t in annotated.tensors
    )
    for name, users in ((RANDOM, drawing), (EXCHANGE, exchanging)):
        if users:
            tensors = (*tensors, TensorSpec(name=name, size_bytes=0, kind=TensorKind.INPUT))
    return replace(annotated, ops=ops, tensors=tensors)


def _meta(arg: object) -> object:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _own_bytes(node: fx.Node) -> int:
    """Return what an op of a step allocates inside, where fake tensors do not see it."""
    values: list[Any] = [_meta(arg) for arg in node.args]
    if rank_ops.exchanges(node.target):
        return rank_ops.workspace_bytes(node.target, pytree.tree_map(_meta, node.args))
    if node.target in (row_draws.dropout, row_draws.drawn):
        return row_draws.workspace_bytes(node.target, values)
    if node.target in class_updates.RULE_OF:
        parameter, gradient, *_, scale, begin, end, _ = values
        rule, scaled = class_updates.RULE_OF[node.target], scale is not None
        return class_updates.workspace_bytes(rule, parameter, gradient, end - begin, scaled=scaled)
    match node.target:
        case update_ops.adam:
            parameter, gradient, moment, _, _, scale, *_ = values
            return update_ops.workspace_bytes(
                parameter, gradient, moment.numel(), scaled=scale is not None
            )
        case update_ops.sgd:
            parameter, gradient, *_, begin, end, _ = values
            return update_ops.workspace_bytes(parameter, gradient, end - begin, scaled=True)
        case coded_updates.adam_coded:
            parameter, gradient, _, _, _, scale, begin, end, *_ = values
            return coded_updates.workspace_bytes(
                parameter, gradient, end - begin, scaled=scale is not None
            )
        case coded_updates.sgd_coded:
            parameter, gradient, *_, begin, end, _ = values
            return coded_updates.workspace_bytes(parameter, gradient, end - begin, scaled=True)
        case update_ops.accumulate:
            total, gradient, shape, stride, _ = values
            layout = gradient.new_empty_strided(shape, stride)
            return update_ops.workspace_bytes(layout, gradient, total.numel(), scaled=False)
        case update_ops.clip_scale | update_ops.total_norm:
            return _SCALARS_BYTES + 8 * len(node.all_input_nodes)
    return 0
