"""Provable: what a step in micro-batches computes exactly, and all else refused by name.

The mean over micro-batches of equal size is the mean over the batch where the loss is a mean over rows and rows know
nothing of each other. Both are read off the graph; where they are not to be seen there, a batch is one micro-batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.capture.batches import map_tensors
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import draws
from gascompile.distributed.rows import num_rows
from gascompile.passes.parallel.rows import UNKNOWN, States, shape_of
from gascompile.passes.parallel.rows_apart import rows_apart, uniform_alone
from gascompile.training.capture.following_rows import RowsTraced, following_rows
from gascompile.training.capture.joint import Joint
from gascompile.training.capture.means import (
    NLL,
    is_a_mean,
    is_row_by_row,
    needed,
    of_batch,
    own_backward,
)

_aten = torch.ops.aten
_SAME = (_aten.clone.default, _aten.alias.default, _aten.detach.default, _aten._to_copy.default, _aten.neg.default,
         _aten.view.default, _aten.reshape.default, _aten.squeeze.default)  # fmt: skip
_INSTEAD = "train in one process, or let ranks have rows of their own (a mesh without 'pp')"


def require_provable(joint: Joint) -> None:
    """Refuse what a pipeline would compute otherwise than one process.

    Raises:
        UnsupportedOpError: names it.
    """
    graph = joint.graph_module.graph
    if joint.mutations:
        raise UnsupportedOpError(
            f"the model changes its buffer '{min(joint.mutations)}' in the forward pass, which a pipeline does not: "
            f"{_INSTEAD}, or freeze it (eval() of batch norms)"
        )
    if joint.views:
        raise UnsupportedOpError(
            f"'{min(joint.views)}' is a view of another parameter, and stages of a pipeline may have only one of the "
            f"two: {_INSTEAD}"
        )
    for node in graph.nodes:
        if draws(node.target) and _given(node, "p", "dropout_p") != 0:
            raise UnsupportedOpError(
                f"{node.target} draws random numbers, others in micro-batches than in one batch: set dropout to 0 for "
                f"a pipeline; or {_INSTEAD}"
            )
        if "batch_norm" in str(node.target) and _given(node, "training", "train"):
            raise UnsupportedOpError(
                f"{node.target} normalises by the rows of a micro-batch: call eval() of batch norms; or {_INSTEAD}"
            )
    num_read = len(joint.outside) - joint.num_constants
    for tensor in list(joint.outside.values())[:num_read]:
        if tensor.dim():
            raise UnsupportedOpError(
                f"the loss uses a tensor from outside the model of {list(tensor.shape)}, of which nobody can say what "
                "a micro-batch has of it: pass it in the batch, or make it a buffer of the model"
            )


def _given(node: fx.Node, *names: str) -> Any:
    """Return an argument of an op that has one of these names."""
    target: Any = node.target
    every = {argument.name: argument.default_value for argument in target._schema.arguments}
    given = {**every, **dict(zip(every, node.args, strict=False)), **node.kwargs}
    return next((given[name] for name in names if name in given), None)


def why_whole(joint: Joint, rows: int) -> str:
    """Return why a batch cannot be several micro-batches; nothing where it can.

    Their mean loss is that of the batch where a loss is a mean over rows that know nothing of each other.

    Args:
        joint: over all rows of a batch.
        rows: their number.
    """
    if why := own_backward(joint):
        return why
    dependent, left = of_batch(joint, rows), [joint.loss]
    places: dict[fx.Node, States] | None = None
    while left:
        node = left.pop()
        if node not in dependent:
            continue
        given = [a for a in node.all_input_nodes if a in dependent]
        if _is_linear(node, given):
            left += given
        elif not is_a_mean(node):
            return f"the loss is no mean over rows as far as its graph shows ('{node.name}' of {node.target})"
        else:
            if places is None:
                places = _places(joint, rows)
            if (op := _first_mixing(node, places)) is not None:
                return f"rows may know of each other, by '{op.name}' of {op.target}"
    return ""


def what_differs(joint: Joint, small: Joint, rows: int, count: int) -> str:
    """Return what a micro-batch computes otherwise than the whole batch; nothing where only its rows are fewer.

    Numbers that a trace took from the batch, as ``len(batch)``, are others there, and so is what is as large as it.

    Args:
        joint: over all rows of a batch.
        small: over those of a micro-batch.
        rows: of the batch.
        count: of micro-batches.
    """
    whole = RowsTraced(joint, rows, [joint.loss])
    part = RowsTraced(small, rows // count, [small.loss])
    follows = following_rows(whole, part, _places(joint, rows))
    return f"'{follows[0].name}' of {follows[0].target} {follows[1]}" if follows else ""


def _places(joint: Joint, rows: int) -> dict[fx.Node, States]:
    graph = joint.graph_module.graph
    batch = [node for node in graph.nodes if node.name in joint.inputs and shape_of(node)]
    return rows_apart(graph, batch, rows)


def _first_mixing(mean: fx.Node, places: Mapping[fx.Node, States]) -> fx.Node | None:
    """Return the first op up to a mean that may mix rows, or give one what belongs to another."""
    if mean.target is operator.getitem:
        (mean,) = mean.all_input_nodes
    sources = mean.all_input_nodes
    behind = [n for n in needed(sources) if UNKNOWN in pytree.tree_leaves(places.get(n))]
    is_apart = is_row_by_row(mean, places, uniform_alone(mean.graph))
    return min(behind, default=None if is_apart else mean)


def _is_linear(node: fx.Node, given: list[fx.Node]) -> bool:
    """Return whether a number is a mean over rows if those ``given`` are that it depends on."""
    value = node.meta["val"]
    if value.numel() != 1 or not value.is_floating_point():
        return False
    if node.target in (*_SAME, _aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar):
        return True
    of_batch = [operand in given for operand in node.args]
    if node.target is _aten.div.Tensor:
        return of_batch == [True, False]
    return node.target is _aten.mul.Tensor and sum(of_batch) == 1


Counter = Callable[[Sequence[Any]], list[list[int]]]
"""Returns how many targets are ignored, of each loss, in each micro-batch of a batch's leaves."""


def ignored_counter(joint: Joint, rows: int) -> Counter | None:
    """Return what counts the targets that losses ignore: their means are over the others alone.

    Args:
        joint: of a micro-batch.
        rows: of a micro-batch.

    Raises:
        UnsupportedOpError: targets are computed by the model.
    """
    nodes = joint.graph_module.graph.nodes
    losses = [node for node in nodes if node.target in NLL]
    if not losses:
        return None
    graph = fx.Graph()
    made = {n: graph.placeholder(n.name) for n in nodes if n.op == "placeholder"}
    made_of = needed([loss.args[1] for loss in losses])
    if bound := sorted({n.name for n in made_of} & joint.bound.keys()):
        raise UnsupportedOpError(
            f"the targets of {losses[0].target} depend on the model ('{joint.bound[bound[0]]}'), so that nobody can "
            f"say beforehand how many of them a micro-batch ignores; {_INSTEAD}"
        )
    for node in nodes:
        if node in made_of and node.op == "call_function":
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[loss.args[1]] for loss in losses])
    run = fx.GraphModule(nn.Module(), graph)
    ignored: list[Any] = [loss.args[4] for loss in losses]
    names = [n.name for n in nodes if n.op == "placeholder"]

    def counts(leaves: Sequence[Any]) -> list[list[int]]:
        ignored_of = []
        num_rows = next(leaf.shape[0] for leaf in leaves if _has_rows(leaf))
        for begin in range(0, num_rows, rows):
            own = [leaf[begin : begin + rows] if _has_rows(leaf) else leaf for leaf in leaves]
            given = {**dict(zip(joint.inputs, own, strict=True)), **joint.outside}
            targets = run(*(given.get(name) for name in names))
            pairs = zip(targets, ignored, strict=True)
            ignored_of.append([int((target == number).sum()) for target, number in pairs])
        return ignored_of

    return counts


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def split_rows(batch: Any, count: int) -> tuple[Any, int]:
    """Return the first of ``count`` micro-batches, and the rows of each.

    Raises:
        UnsupportedOpError: rows cannot be told, or are not divided evenly.
    """
    if count == 1:
        return batch, 0
    rows = num_rows(batch)
    if rows % count:
        raise UnsupportedOpError(
            f"{rows} rows are not {count} micro-batches of one size; pass a batch of a multiple of {count} rows"
        )
    own = rows // count

    def first(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim():
            return leaf
        if not leaf.is_contiguous():
            raise UnsupportedOpError(
                f"a tensor of the batch, {list(leaf.shape)}, does not lie row after row; pass its contiguous()"
            )
        return leaf[:own]

    return map_tensors(first, batch), own
