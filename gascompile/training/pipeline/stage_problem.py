"""Stage problem: what the ops of a captured step take, as the cut into stages sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import copied_graph
from gascompile.core.workload import Workload
from gascompile.passes.parallel.cut_stages import StageOps
from gascompile.passes.parallel.legs import Legs, assign_legs, placeholders, staged
from gascompile.training.capture.joint import Joint
from gascompile.training.planning import program_specs
from gascompile.training.planning.step_program import StepProgram

_MOST_CUTS = 48
"""Places where stages may begin: the search looks at all pairs of them for every rank."""


def program_of(joint: Joint, name: str) -> StepProgram:
    """Return forward and backward pass of a micro-batch as a program without updates, for what its ops cost."""
    graph = copied_graph(joint.graph_module.graph)
    leaves = pytree.tree_leaves(graph.output_node().args)
    results = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node))
    return StepProgram(
        program=program_specs.program_of(joint, graph, results, name),
        tiles={},
        outside=tuple(joint.outside.values()),
        num_constants=joint.num_constants,
        num_groups=0,
        gradients=frozenset(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The ops of a joint graph that one rank alone runs."""

    ops: Sequence[fx.Node]
    num_forward: int
    """How many of them, the first, are the forward pass."""

    @property
    def forward(self) -> Sequence[fx.Node]:
        """Return those of the forward pass."""
        return self.ops[: self.num_forward]

    def legs(self, stages: Sequence[int], num_stages: int, holders: Mapping[str, set[int]]) -> Legs:
        """Return the legs under a division of the forward pass."""
        return assign_legs(self.ops, stages, num_stages, holders)


def staged_of(joint: Joint, trained: Collection[str]) -> Staged:
    """Return the ops that one rank alone runs, those of the forward pass first.

    Args:
        joint: of a micro-batch.
        trained: names of what steps may change.

    Raises:
        UnsupportedOpError: the loss is no op of the model, or ops of both passes are mixed.
    """
    graph = joint.graph_module.graph
    values = {node.name: node.meta["val"] for node in graph.nodes if node.name in joint.bound}
    sizes = {name: value.numel() * value.element_size() for name, value in values.items()}
    fixed = {p for p, name in joint.bound.items() if name not in trained}
    ops = staged(graph, sizes, fixed)
    count = next((i + 1 for i, node in enumerate(ops) if node is joint.loss), 0)
    if not count:
        raise UnsupportedOpError(
            "the loss depends on no parameter by an op that a stage can run; train in one process"
        )
    return Staged(ops=ops if joint.gradients else ops[:count], num_forward=count)


def holders_of(ops: Sequence[fx.Node], stages: Sequence[int]) -> dict[str, set[int]]:
    """Return the stages that read what a placeholder is bound to."""
    own = set(ops)
    holders: dict[str, set[int]] = {}
    for node, stage in zip(ops, stages, strict=True):
        for source in placeholders(node, own):
            holders.setdefault(source.name, set()).add(stage)
    return holders


def stage_ops(
    staging: Staged, names: Mapping[str, str], workload: Workload, num_states: int
) -> StageOps:
    """Return what the ops of the forward pass, each with its part of the backward pass, need and send.

    Args:
        staging: the ops.
        names: placeholder -> name of the weights that count, those that are trained where there is a backward pass.
        workload: bytes of all ops.
        num_states: vectors beside each weight.
    """
    size = staging.num_forward
    first = holders_of(staging.forward, range(size))
    legs = staging.legs(range(size), size, first)
    weights, counts = [0] * size, [0] * size
    seen: set[str] = set()
    for node in staging.forward:
        place = legs.leg_of[node]
        for source in placeholders(node, set(staging.ops)):
            name = names.get(source.name)
            if name is not None and name not in seen:
                seen.add(name)
                weights[place] += _bytes(source)
                counts[place] += 1
    kept, sent = [0] * size, [0] * (size + 1)
    for source, (low, high) in _spans(legs).items():
        for place in range(low + 1, high + 1):
            sent[place] += _bytes(source)
    for message in _kept(legs):
        kept[legs.rank_of(legs.leg_of[message])] += _bytes(message)
    needs = {op.name: op for op in workload.ops}
    tensors = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    least, calls = [0] * size, [0] * size
    for node, leg in legs.leg_of.items():
        rank = legs.rank_of(leg)
        calls[rank] += 1
        op = needs[node.name]
        touched = {*op.reads, *op.writes}
        both = op.workspace_bytes + sum(tensors.get(name, 0) for name in touched)
        least[rank] = max(least[rank], both)
    return StageOps(
        weight_bytes=weights,
        num_weights=counts,
        kept_bytes=kept,
        least_bytes=least,
        sent_bytes=sent[:size],
        num_states=num_states,
        is_cut=cuts(sent[:size]),
        num_calls=calls,
    )


def op_seconds(staging: Staged, workload: Workload, site: str) -> list[float]:
    """Return what each op of the forward pass takes, with its part of the backward pass."""
    size = staging.num_forward
    legs = staging.legs(range(size), size, holders_of(staging.forward, range(size)))
    times = {op.name: op.time_s[site] for op in workload.ops}
    seconds = [0.0] * size
    for node, leg in legs.leg_of.items():
        seconds[legs.rank_of(leg)] += times[node.name]
    return seconds


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _spans(legs: Legs) -> dict[fx.Node, tuple[int, int]]:
    """Return the stages between which each value is sent, where each op is a stage."""
    spans: dict[fx.Node, tuple[int, int]] = {}
    for message in legs.messages:
        ends = legs.rank_of(message.source), legs.rank_of(message.target)
        low, high = spans.get(message.value, ends)
        spans[message.value] = min(low, *ends), max(high, *ends)
    return spans


def _kept(legs: Legs) -> list[fx.Node]:
    """Return the results of the forward pass that the backward pass reads."""
    size = legs.num_stages
    late = [node for node, leg in legs.leg_of.items() if leg >= size]
    own = legs.leg_of.keys()
    read: dict[fx.Node, None] = {}
    for node in late:
        left = list(node.all_input_nodes)
        while left:
            source = left.pop()
            if source not in own:
                left += source.all_input_nodes
            elif legs.leg_of[source] < size:
                read[source] = None
    return list(read)


def cuts(sent: Sequence[int]) -> list[bool]:
    """Return where stages may begin: of each of a number of equal parts of the ops, where the least is sent.

    All ops are in reach of a cut then. What is sent least of all is often the loss, behind which a stage has nothing to
    do.

    Args:
        sent: what is sent where a stage begins with an op, in bytes; at the first op none can.
    """
    step = max(-(-(len(sent) - 1) // _MOST_CUTS), 1)
    parts = (range(begin, min(begin + step, len(sent))) for begin in range(1, len(sent), step))
    chosen = {min(part, key=sent.__getitem__) for part in parts}
    return [i in chosen for i in range(len(sent))]
