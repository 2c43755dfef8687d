"""Rows apart: where the rows of a batch lie in what knows nothing of more than one of them.

An op is believed to keep rows apart if it is known to make of each row what it would make of it alone, wherever in a
batch it stands: then a batch may be computed in parts. Of any other op nothing is known, and nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import draws
from gascompile.passes.parallel.rows import (
    LOSSES,
    UNKNOWN,
    Axis,
    State,
    States,
    argument_of,
    is_pointwise,
    name_of,
    row_axes,
    shape_of,
)

_BY_FIRST = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_fused_rms_norm", "_log_softmax",
        "_native_batch_norm_legit_no_training", "_reshape_alias", "_safe_softmax", "_softmax", "_to_copy",
        "_unsafe_view", "adaptive_max_pool2d", "alias", "all", "amax", "amin", "any", "argmax", "avg_pool1d",
        "avg_pool2d", "avg_pool3d", "clone", "constant_pad_nd", "convolution", "cumsum", "detach", "expand", "fill",
        "flip", "full_like", "index_select", "linalg_vector_norm", "max", "max_pool2d_with_indices",
        "max_pool3d_with_indices", "mean", "native_group_norm", "native_layer_norm", "norm", "ones_like", "permute",
        "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
        "replication_pad2d", "reshape", "select", "slice", "sort", "split", "split_with_sizes", "squeeze", "sum", "t",
        "topk", "transpose", "tril", "triu", "unbind", "unsqueeze", "upsample_bicubic2d", "upsample_bilinear2d",
        "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "var", "view", "zeros_like",
    }
)  # fmt: skip
"""Ops that make each row of the first operand's by itself."""
_DRAWS_LIKE = frozenset(
    {
        "bernoulli", "exponential", "native_dropout", "normal_functional", "rand_like", "randint_like", "randn_like",
        "uniform",
    }
)  # fmt: skip
"""Ops that draw an element for each of their first operand's."""
_FILLS = frozenset({"full", "new_full", "new_ones", "new_zeros", "ones", "scalar_tensor", "zeros"})
"""Ops that fill what they make with one value."""
_KEEPING = frozenset(
    {
        "_to_copy", "alias", "clone", "expand", "lift_fresh_copy", "reshape", "select", "slice", "squeeze", "unsqueeze",
        "view",
    }
)  # fmt: skip
"""Ops whose result has no values but those of their operand."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""By where their matrices begin among their arguments."""


def rows_apart(
    graph: fx.Graph, batch: Collection[fx.Node], rows: int, *, draws_by_rows: bool = False
) -> dict[fx.Node, States]:
    """Return the axis of rows of what keeps them apart, and what is known of all else, as ``row_axes`` does.

    Args:
        graph: of a model over ``rows`` rows.
        batch: placeholders whose first dimension the rows are.
        rows: two at least: of one row nobody could say which dimension it is.
        draws_by_rows: each row gets the random numbers that it would get alone.
    """
    drawn = drawn_alone(graph) if draws_by_rows else None
    uniform = uniform_alone(graph)
    return row_axes(
        graph,
        batch,
        rows,
        repeated(graph, batch, rows),
        partial(_keeps_apart, rows, drawn, uniform),
    )


def repeated(graph: fx.Graph, batch: Collection[fx.Node], rows: int) -> dict[fx.Node, State]:
    """Return what is the same for each row, and there once for each of them, as a token before all others is."""
    found: dict[fx.Node, State] = {}
    dependent = set(batch)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        elif name_of(node.target) == "expand":
            shape, before = shape_of(node), shape_of(node.args[0])
            is_of_one = len(before) < len(shape) or before[:1] == [1]
            if is_of_one and shape[:1] == [rows]:
                found[node] = Axis(0)
    return found


def uniform_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return what has one value everywhere, made of such values element by element."""
    uniform: set[fx.Node] = set()
    for node in graph.nodes:
        sources, name = node.all_input_nodes, name_of(node.target)
        keeps = is_pointwise(node.target) or name in _KEEPING
        if name in _FILLS or (bool(sources) and keeps and uniform.issuperset(sources)):
            uniform.add(node)
    return uniform


def drawn_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return what is made of random numbers alone, element by element."""
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_of_drawn = bool(sources) and drawn.issuperset(sources) and is_pointwise(node.target)
        is_cast = name_of(node.target) in ("_to_copy", "clone") and drawn.issuperset(sources)
        if is_of_drawn or is_cast or (draws(node.target) and not sources):
            drawn.add(node)
    return drawn


def _keeps_apart(
    rows: int,
    drawn: Collection[fx.Node] | None,
    uniform: Collection[fx.Node],
    node: fx.Node,
    known: Mapping[fx.Node, States],
    axis: Axis,
) -> bool:
    name, shape, operands = name_of(node.target), shape_of(node), node.all_input_nodes
    if UNKNOWN in pytree.tree_leaves([known[operand] for operand in operands]):
        return False
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    if is_one and shape[axis.dim] != axis.above * rows * axis.repeat:
        return False
    if not name:
        return True  # of a tuple that keeps them apart
    of_rows = [operand for operand in operands if _has_rows(known, operand)]
    others = [
        o for o in operands if o not in of_rows and o not in uniform and o not in (drawn or ())
    ]
    if name in LOSSES and name.startswith("nll"):
        return of_rows == list(node.args[:2])
    if is_pointwise(node.target) or name in LOSSES:
        return is_even(others, axis, len(shape))
    if name in ("cat", "stack"):
        return not any(prod(shape_of(operand)) for operand in others)
    if name == "copy":
        return of_rows == [node.args[1]]
    if name in ("select_scatter", "slice_scatter"):
        dim = argument_of(node, "dim", 0) % len(shape)
        written = axis.at(axis.dim - (name == "select_scatter" and dim < axis.dim))
        is_same = all(known[o] == (written if o is node.args[1] else axis) for o in of_rows)
        return dim != axis.dim and not others and is_same
    if name == "index":
        table, indices = cast(tuple[fx.Node, Sequence[Any]], node.args[:2])
        return len(of_rows) == 1 or (table in of_rows and indices[0] is not None)
    if name in _PRODUCTS:
        left, right = node.args[_PRODUCTS[name] :][:2]
        both = len(shape) == 3 and axis.dim == 0
        bias = [operand for operand in operands if operand not in (left, right)]
        return of_rows == ([left, right] if both else [left]) and is_even(bias, axis, len(shape))
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        # A mask without heads would be broadcast from its end: its rows would be places.
        of_all = all(known[o] == Axis(0) and len(shape_of(o)) == 4 for o in of_rows)
        is_whole = of_all and {*of_rows}.issuperset(node.args[:3])
        return is_whole and axis.dim == 0 and is_even(others, axis, len(shape))
    if name == "embedding":
        # Whose gradient counts how often all rows look a word up?
        return of_rows == [node.args[1]] and not argument_of(node, "scale_grad_by_freq")
    if name == "gather":
        return of_rows == [node.args[2]]
    if drawn is not None and name in _DRAWS_LIKE:
        return of_rows == [node.args[0]]
    inner = 2 if name in ("tril", "triu") else 0
    if name == "constant_pad_nd":
        inner = len(argument_of(node, "pad")) // 2
    return name in _BY_FIRST and of_rows == [node.args[0]] and axis.dim < len(shape) - inner


def _has_rows(known: Mapping[fx.Node, States], node: fx.Node) -> bool:
    return any(isinstance(state, Axis) for state in pytree.tree_leaves(known[node]))


def is_even(operands: Sequence[fx.Node], axis: Axis, rank: int) -> bool:
    """Return whether operands without rows have one value for all of them where they are broadcast.

    Args:
        operands: of an op of what has rows.
        axis: of these, in the op's result.
        rank: dimensions of that.
    """
    places = [(shape_of(node), axis.dim - rank + len(shape_of(node))) for node in operands]
    return all(place < 0 or shape[place] == 1 for shape, place in places)
