"""Rank nodes: what a step's program has where several ranks train one model."""

from __future__ import annotations

import operator

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import draws
from gascompile.core.ranks import RankLayout
from gascompile.training.capture.joint import Joint
from gascompile.training.optimizers import rank_ops
from gascompile.training.optimizers.optimizers import FEWEST_SHARED
from gascompile.training.optimizers.slots import Slot


def is_small(parameter: fx.Node, layout: RankLayout | None) -> bool:
    """Return whether ranks sum a parameter's gradient in one exchange with others."""
    count: int = parameter.meta["val"].numel()
    return layout is not None and count < layout.size * FEWEST_SHARED


def added(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """Add the sums of values over the ranks, in one exchange."""
    total = graph.call_function(rank_ops.add, (nodes,))
    total.meta["val"] = [torch.empty_like(node.meta["val"]) for node in nodes]
    found = []
    for number, value in enumerate(total.meta["val"]):
        found.append(graph.call_function(operator.getitem, (total, number)))
        found[-1].meta["val"] = value
    return found


def own_parts(
    graph: fx.Graph, slot: Slot, gradient: fx.Node, parameter: fx.Node, rank: int
) -> list[fx.Node]:
    """Add the sums over the ranks of what ``rank`` updates of a parameter, range by range."""
    like = parameter.meta["val"]
    shape, stride = list(like.shape), list(like.stride())
    found = []
    for bounds, (begin, end) in zip(slot.bounds, slot.ranges, strict=True):
        args = (gradient, shape, stride, list(bounds), rank)
        found.append(graph.call_function(rank_ops.add_part, args))
        found[-1].meta["val"] = gradient.meta["val"].new_empty(end - begin)
    return found


def norm(graph: fx.Graph, norms: list[fx.Node]) -> fx.Node:
    """Add the norm of what all ranks have parts of, from those of this rank's."""
    found = graph.call_function(rank_ops.norm, (norms,))
    found.meta["val"] = norms[0].meta["val"].new_empty(())
    return found


def gathered(graph: fx.Graph, slot: Slot, parameter: fx.Node) -> None:
    """Add what fetches the elements that other ranks have updated."""
    for bounds in slot.bounds:
        node = graph.call_function(rank_ops.gather, (parameter, list(bounds)))
        node.meta["val"] = None


def require_synchronised(graph: fx.Graph) -> None:
    """Refuse batch norms over the rows of one rank; those of ``functional.batch_norm`` are over all ranks' by now.

    Raises:
        UnsupportedOpError: names the op.
    """
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or "batch_norm" not in str(target):
            continue
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if given.get("training") or given.get("train"):
            raise UnsupportedOpError(
                f"{target} normalises by the rows of one rank; call torch.nn.functional.batch_norm or a module of "
                "torch.nn, which several ranks compute over all rows, or train in one process"
            )


def require_same_on_all(name: str, value: fx.Node, joint: Joint) -> None:
    """Refuse a new value of a buffer that the rows of one rank decide.

    Args:
        name: of the buffer.
        value: its new one.
        joint: what it is a part of.

    Raises:
        UnsupportedOpError: names the buffer.
    """
    # What the trace has made of numbers is in the graph of every rank.
    num_read = len(joint.outside) - joint.num_constants
    inputs = {*joint.inputs, *list(joint.outside)[:num_read]}
    left, seen = [value], {value}
    while left:
        node = left.pop()
        if node.op == "call_function" and rank_ops.exchanges(node.target):
            continue
        if node.name in inputs or draws(node.target):
            raise UnsupportedOpError(
                f"the model changes its buffer '{name}' in the forward pass by what the rows of this rank are, and "
                "ranks would drift apart; only batch norms are computed over all ranks. Change it between steps, or "
                "train in one process"
            )
        left += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
