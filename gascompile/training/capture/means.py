"""Means: numbers of a graph that are means over the rows of a batch, or over its targets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gascompile.capture.record.record import CaptureRecord
from gascompile.passes.parallel.rows import Axis, States, shape_of
from gascompile.passes.parallel.rows_apart import is_even, repeated

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

_aten = torch.ops.aten
MEANS = {
    _aten.mse_loss.default: 2,
    _aten.l1_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
    _aten.binary_cross_entropy_with_logits.default: 4,
}
"""Losses, by where their reduction stands."""
NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
"""Losses of which targets may be ignored."""
MEAN, SUM = 1, 2
"""Torch's numbers of these reductions."""


def of_batch(joint: Joint, rows: int = 0) -> set[fx.Node]:
    """Return what depends on the batch; with a number of ``rows`` also what is there once for each of them."""
    graph = joint.graph_module.graph
    batch = [node for node in graph.nodes if node.name in joint.inputs]
    dependent = {*batch, *(repeated(graph, batch, rows) if rows else ())}
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def own_backward(joint: Joint) -> str:
    """Return what has a backward pass that is not that of its forward pass, so that nobody can say what it is of."""
    record = joint.record
    if not isinstance(record, CaptureRecord) or not record.running.calls_back:
        return ""
    return next(
        iter(record.running.backward),
        "code in Python, as hooks of modules are, runs in the backward pass",
    )


def reduction_of(node: fx.Node) -> int | None:
    """Return how a loss of torch's reduces; ``None`` where it is none of those."""
    target: Any = node.target
    place = MEANS.get(target)
    if place is not None:
        return node.args[place] if len(node.args) > place else node.kwargs.get("reduction", MEAN)  # type: ignore[return-value]
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    (loss,) = node.all_input_nodes
    return loss.args[3] if loss.target in NLL else None  # type: ignore[return-value]


def is_a_mean(node: fx.Node) -> bool:
    """Return whether a number is a mean over all elements of something, each as much as the others."""
    if node.target is _aten.mean.default:
        return True
    if reduction_of(node) != MEAN:
        return False
    return node.target in MEANS or node.all_input_nodes[0].args[2] is None


def is_row_by_row(
    op: fx.Node, places: Mapping[fx.Node, States], uniform: Collection[fx.Node]
) -> bool:
    """Return whether an op is of rows, each compared with its own part of all else.

    Args:
        op: a mean, a sum or a loss.
        places: where rows are, as ``rows_apart`` says.
        uniform: what has one value everywhere.
    """
    is_of_classes = op.target in NLL  # a dimension that targets do not have
    axes: set[Axis] = set()
    others: list[fx.Node] = []
    for node in op.all_input_nodes:
        axis, is_aligned = places.get(node), is_of_classes and node in op.args[:2]
        if isinstance(axis, Axis):
            if is_of_classes and axis.dim:
                return False  # rows may be the classes
            axes.add(axis if is_aligned else axis.at(axis.dim - len(shape_of(node))))
        elif node not in uniform and (is_aligned or not is_of_classes):
            others.append(node)
    if is_of_classes and others:
        return False
    return len(axes) == 1 and all(is_even(others, axis, 0) for axis in axes)


def needed(
    nodes: Sequence[Any],
    is_end: Callable[[fx.Node], bool] = lambda _: False,
    made_of: Callable[[fx.Node], Sequence[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return nodes and what they are made of, up to those that are an end."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found and not is_end(node):
            found.add(node)
            left += made_of(node)
    return found
