"""Annotate: a program becomes a planning problem with FLOPs, bytes, seconds, lifetimes and workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.program import Dim, Program
from gascompile.core.workload import OpSpec, Workload
from gascompile.cost_models.measure.op_memory import OpCall
from gascompile.formats.ops import LINEAR
from gascompile.passes.graph.facts import Facts, OpFacts
from gascompile.passes.graph.leaving import bound_tensors, leaves
from gascompile.passes.graph.op_costs import op_spec, tensor_specs, time_s
from gascompile.passes.graph.propagate import propagate


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A workload, and what could not be costed."""

    workload: Workload
    unknown_ops: tuple[str, ...]
    """Kernels that no formula covers; their time counts the bytes they touch and nothing else."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What the workspace of each op depends on, by its name."""
    calls: Mapping[str, OpCall] = field(default_factory=dict)
    """Ops that compute, by name; on fake tensors of the processor, as they were captured."""
    unproven: Mapping[str, OpCall] = field(default_factory=dict)
    """Ops whose workspace no formula bounds, by name."""
    returned: frozenset[str] = frozenset()
    """Tensors of which the program returns all or a part, weights and states included."""


def annotate(
    program: Program,
    machine: Machine,
    *,
    repeats: bool = True,
    sites: Sequence[str] = (),
    parts: bool = False,
) -> Annotation:
    """Return the workload of ``program`` on ``machine`` at the largest input shapes.

    FLOPs follow torch's own flop counter; seconds are the roofline of the machine's rates, per kernel.

    Args:
        program: what was captured.
        machine: whose rates count.
        repeats: iterations follow each other.
        sites: other tiers whose processors may run ops; those that may leave get their seconds there, too.
        parts: linear layers may be divided among processors; those that can say so.

    Raises:
        UnsupportedOpError: an op's shapes are not known ahead of time.
    """
    facts = propagate(program)
    device = machine.compute_tier
    nodes = {node.name: node for node in program.op_nodes()}
    ops = tuple(
        op_spec(op, program.states, device, machine, *_parts(nodes[op.name], op, program, facts))
        for op in facts.ops
    )
    tensors = tensor_specs(
        facts,
        inputs={f"%{spec.name}" for spec in program.inputs},
        bound=program.bound,
        states=program.states,
        forms=program.forms,
    )
    # Sizes are numbers that one processor would have to tell the other.
    is_fixed = not any(isinstance(d, Dim) for spec in program.inputs for d in spec.shape)
    if sites and is_fixed:
        ops = _with_sites(ops, facts, nodes, bound_tensors(tensors, ops), machine, sites)
    if parts and is_fixed:
        ops = _with_cuts(ops, nodes, program, facts)
    unknown = sorted({leaf.target for op in facts.ops for leaf in op.leaves if not leaf.known})
    workload = Workload(name=program.name, repeats=repeats, tensors=tensors, ops=ops)
    return Annotation(
        workload=workload,
        unknown_ops=tuple(unknown),
        kinds={op.name: op.kind for op in facts.ops if op.kind},
        calls={op.name: op.call for op in facts.ops if op.call is not None},
        unproven={op.name: op.unproven for op in facts.ops if op.unproven is not None},
        returned=facts.outputs,
    )


def _parts(
    node: torch.fx.Node, op: OpFacts, program: Program, facts: Facts
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the weight that an op could take in tiles, with its rows, and the one it needs rows of, with their bytes.

    Only a weight that the op is given as it lies in its file counts: its rows are ranges of bytes there.
    """
    # Tiles write their part of a result as it is: they cast nothing.
    is_plain = node.target is torch.ops.aten.linear.default and op.has_one_dtype
    if is_plain or node.target is LINEAR:
        weight = _weight(node.args[1], program)
        if weight is not None:
            return {weight: program.bound[weight].shape[0]}, {}
    if node.target is torch.ops.aten.embedding.default:
        weight = _weight(node.args[0], program)
        if weight is not None:
            return {}, {weight: facts.size_bytes[f"%{node.name}"]}
    return {}, {}


def _cuts(node: torch.fx.Node, op: OpSpec, program: Program, facts: Facts) -> Mapping[str, int]:
    """Return the weight and the bias of a linear layer whose output features may be computed apart, with their number.

    Such a layer makes one tensor that is its own, whole, of weights as they lie in their files.
    """
    if node.target is not torch.ops.aten.linear.default or node.kwargs:
        return {}
    x, weight, bias = (*node.args, None)[:3]
    names = [_weight(weight, program), *([_weight(bias, program, 1)] if bias is not None else [])]
    given = _weight(x, program) or _weight(x, program, 1)
    rows = program.bound[names[0]].shape[0] if names[0] else 0
    own = f"%{op.name}"
    if None in names or given in names or len({*names}) < len(names) or op.writes != (own,):
        return {}
    same = all(program.bound[name].shape[0] == rows for name in names if name)
    if not rows or not same or facts.size_bytes[own] % rows:
        return {}
    return {name: rows for name in names if name}


def _with_cuts(
    ops: Sequence[OpSpec], nodes: Mapping[str, torch.fx.Node], program: Program, facts: Facts
) -> tuple[OpSpec, ...]:
    """Return the ops with what they may be in parts along: layers, and pointwise ops of what may be in parts."""
    cut_ops: list[OpSpec] = []
    apart: set[str] = set()
    for op, known in zip(ops, facts.ops, strict=True):
        cuts = _cuts(nodes[op.name], op, program, facts) if op.splits else {}
        if not op.splits and apart.issuperset(op.reads):
            cuts = _pointwise_cuts(nodes[op.name], op, known.features)
        apart.update(op.writes if cuts else ())
        cut_ops.append(replace(op, cuts=cuts))
    return tuple(cut_ops)


def _pointwise_cuts(node: torch.fx.Node, op: OpSpec, features: int) -> Mapping[str, int]:
    """Return the results whose features an op takes one by one, with their number; empty for other ops.

    It makes one tensor that is its own, of the shape and dtype of each that it is given.
    """
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    given = {f"%{argument.name}" for argument in node.all_input_nodes}
    if not is_pointwise or op.writes != (f"%{op.name}",) or set(op.reads) != given:
        return {}
    return dict.fromkeys(sorted(given), features) if features else {}


def _weight(argument: object, program: Program, rank: int = 2) -> str | None:
    """Return the weight of ``rank`` dimensions that ``argument`` is bound to, if it lies as in a file."""
    if not isinstance(argument, torch.fx.Node):
        return None
    name = program.bindings.get(argument.name)
    if name is None or name in program.states:
        return None
    if len(program.bound[name].shape) != rank or program.bound[name].stride is not None:
        return None
    return name


def _with_sites(
    ops: Sequence[OpSpec],
    facts: Facts,
    nodes: Mapping[str, torch.fx.Node],
    bound: frozenset[str],
    machine: Machine,
    sites: Sequence[str],
) -> tuple[OpSpec, ...]:
    """Return the ops with the seconds at ``sites`` of those that may run there."""
    costed = []
    for op, known in zip(ops, facts.ops, strict=True):
        times_s = dict(op.time_s)
        if leaves(op, nodes[op.name], bound):
            for site in sites:
                # Without a rate for its dtype there it stays.
                with contextlib.suppress(UnsupportedOpError):
                    times_s[site] = time_s(known, site, machine)
        costed.append(replace(op, time_s=times_s))
    return tuple(costed)
