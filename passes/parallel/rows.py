"""Rows: proof that the rows of a batch know nothing of each other, up to where a loss takes their mean.

Each value has its rows along one dimension, of which they are the outermost part, or has none. An op that is known to
keep rows apart says where they are in its result; of any other nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
NONE, UNKNOWN = -1, -2
"""A value that does not depend on the batch, and one of which nothing is known; others are numbers of dimensions."""


def dimensions_of_rows(graph: fx.Graph, inputs: Collection[str], rows: int) -> dict[fx.Node, int]:
    """Return the dimension of every value that has the rows.

    Args:
        graph: of a model over ``rows`` rows.
        inputs: placeholders whose first dimension the rows are.
        rows: two at least: of one row nobody could say which dimension it is.
    """
    walk = _Walk(rows)
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            has_rows = node.name in inputs and isinstance(value, torch.Tensor) and value.dim()
            walk.found[node] = 0 if has_rows else NONE
        elif node.op == "call_function":
            walk.found[node] = walk.dimension(node)
    return walk.found


class _Walk:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.found: dict[fx.Node, int] = {}

    def dimension(self, node: fx.Node) -> int:
        given = {self.found[source] for source in node.all_input_nodes}
        if UNKNOWN in given:
            return UNKNOWN
        if given <= {NONE}:
            return NONE
        rule = _RULES.get(node.target)
        if rule is None and isinstance(node.target, torch._ops.OpOverload):
            rule = _pointwise if torch.Tag.pointwise in node.target.tags else None
        if rule is None:
            return UNKNOWN
        found = rule(self, node)
        if found < 0 or node.target in _TUPLES:
            return found
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or found >= value.dim():
            return UNKNOWN
        return found if value.shape[found] % self.rows == 0 else UNKNOWN

    def of(self, argument: object) -> int:
        """Return where an argument has rows."""
        return self.found[argument] if isinstance(argument, fx.Node) else NONE


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _argument(node: fx.Node, name: str) -> Any:
    target: Any = node.target
    every = {a.name: a.default_value for a in target._schema.arguments}
    return {**every, **dict(zip(every, node.args, strict=False)), **node.kwargs}[name]


def _pointwise(walk: _Walk, node: fx.Node) -> int:
    """Values that are broadcast to each other: rows lie together, and others have nothing there that differs."""
    rank = len(_shape(node))
    places, others = set(), []
    for source in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(source, fx.Node):
            at = walk.of(source)
            shape = _shape(source)
            if at == NONE:
                others.append(shape)
            else:
                places.add((at + rank - len(shape), shape[at]))
    if len(places) != 1:
        return UNKNOWN
    ((at, size),) = places
    if size != _shape(node)[at]:
        return UNKNOWN
    offset = [at - (rank - len(shape)) for shape in others]
    is_flat = all(o < 0 or shape[o] == 1 for o, shape in zip(offset, others, strict=True))
    return at if is_flat else UNKNOWN


def _view(walk: _Walk, node: fx.Node) -> int:
    source: Any = node.args[0]
    at, old, new = walk.of(source), _shape(source), _shape(node)
    before = math.prod(old[:at])
    for place in range(len(new)):
        if math.prod(new[:place]) == before and new[place] > 1:
            return place if new[place] % walk.rows == 0 else UNKNOWN
    return UNKNOWN


def _permuted(walk: _Walk, node: fx.Node) -> int:
    source: Any = node.args[0]
    rank, at = len(_shape(source)), walk.of(source)
    if node.target is _aten.t.default:
        return rank - 1 - at
    dims: Any = node.args[1]
    if node.target is _aten.transpose.int:
        pair = [_argument(node, name) % rank for name in ("dim0", "dim1")]
        return int(pair[1 - pair.index(at)]) if at in pair else at
    return [dim % rank for dim in dims].index(at)


def _unsqueezed(walk: _Walk, node: fx.Node) -> int:
    at = walk.of(node.args[0])
    place: int = _argument(node, "dim") % len(_shape(node))
    return at + 1 if place <= at else at


def _expanded(walk: _Walk, node: fx.Node) -> int:
    source: Any = node.args[0]
    at = walk.of(source) + len(_shape(node)) - len(_shape(source))
    return at if _shape(node)[at] == _shape(source)[walk.of(source)] else UNKNOWN


def _along(walk: _Walk, node: fx.Node) -> int:
    """An op along one other dimension, which stays."""
    source: Any = node.args[0]
    at, dim = walk.of(source), _argument(node, "dim")
    if any(walk.of(other) != NONE for other in node.all_input_nodes if other is not source):
        return UNKNOWN
    return at if dim is not None and dim % max(len(_shape(source)), 1) != at else UNKNOWN


def _selected(walk: _Walk, node: fx.Node) -> int:
    source: Any = node.args[0]
    at, dim = walk.of(source), _argument(node, "dim") % len(_shape(source))
    return UNKNOWN if dim == at else at - 1 if dim < at else at


def _reduced(walk: _Walk, node: fx.Node) -> int:
    source: Any = node.args[0]
    at, rank = walk.of(source), len(_shape(source))
    dims = _argument(node, "dim")
    if dims is None or dims == []:
        return UNKNOWN
    gone = {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if at in gone:
        return UNKNOWN
    return at if _argument(node, "keepdim") else at - sum(dim < at for dim in gone)


def _together(walk: _Walk, node: fx.Node) -> int:
    tensors: Any = node.args[0]
    rank = len(_shape(tensors[0]))
    places = {walk.of(tensor) for tensor in tensors}
    dim = _argument(node, "dim") % rank
    at = next(iter(places))
    return at if len(places) == 1 and dim != at else UNKNOWN


def _product(walk: _Walk, node: fx.Node) -> int:
    """Matrices: rows of the first stay rows; of batches of matrices each is one of the rows."""
    *bias, left, right = node.args[: 3 if "add" in str(node.target) else 2]
    if any(walk.of(of) != NONE for of in bias):
        return UNKNOWN
    rank, at, other = len(_shape(left)), walk.of(left), walk.of(right)
    if rank == 3 and at == 0 and other == 0:
        return 0
    return at if other == NONE and at == rank - 2 else UNKNOWN


def _looked_up(walk: _Walk, node: fx.Node) -> int:
    return walk.of(node.args[1]) if walk.of(node.args[0]) == NONE else UNKNOWN


def _first(walk: _Walk, node: fx.Node) -> int:
    """Rows are the first dimension of an op's input, and it has no other that depends on the batch."""
    source, *rest = node.args
    alone = all(walk.of(of) == NONE for of in pytree.tree_leaves(rest))
    return 0 if walk.of(source) == 0 and alone else UNKNOWN


def _attention(walk: _Walk, node: fx.Node) -> int:
    """Query, key and value have as many rows first, and a mask has as many or one."""
    for source in node.all_input_nodes:
        at = walk.of(source)
        is_mask = source not in node.args[:3]
        if at not in ((0, NONE) if is_mask else (0,)):
            return UNKNOWN
        if is_mask and at == NONE and len(_shape(source)) > 3 and _shape(source)[0] != 1:
            return UNKNOWN
    return 0


def _normed(walk: _Walk, node: fx.Node) -> int:
    source, sizes, *rest = node.args
    at = walk.of(source)
    inner = at < len(_shape(source)) - len(sizes)  # type: ignore[arg-type]
    return at if inner and all(walk.of(of) == NONE for of in rest) else UNKNOWN


def _kept(walk: _Walk, node: fx.Node) -> int:
    return walk.of(node.args[0])


def _padded(walk: _Walk, node: fx.Node) -> int:
    at, pad = walk.of(node.args[0]), _argument(node, "pad")
    return at if at < len(_shape(node)) - len(pad) // 2 else UNKNOWN


def _matrices(walk: _Walk, node: fx.Node) -> int:
    at = walk.of(node.args[0])
    return at if at < len(_shape(node)) - 2 else UNKNOWN


_Rule = Callable[[_Walk, fx.Node], int]
_TUPLES = frozenset(
    {
        _aten.native_layer_norm.default,
        _aten._fused_rms_norm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.chunk.default,
        _aten.max.dim,
        _aten.topk.default,
    }
)
_RULES: dict[object, _Rule] = {
    operator.getitem: _kept,
    **dict.fromkeys(
        (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.flatten.using_ints,
         _aten.unflatten.int, _aten._reshape_alias.default), _view
    ),
    **dict.fromkeys((_aten.t.default, _aten.transpose.int, _aten.permute.default), _permuted),
    **dict.fromkeys(
        (_aten.clone.default, _aten.contiguous.default, _aten._to_copy.default, _aten.alias.default,
         _aten.detach.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default), _kept
    ),
    _aten.unsqueeze.default: _unsqueezed,
    _aten.expand.default: _expanded,
    **dict.fromkeys(
        (_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default,
         _aten._softmax.default, _aten._log_softmax.default, _aten.cumsum.default, _aten.topk.default,
         _aten.narrow.default, _aten.index_select.default), _along
    ),
    _aten.select.int: _selected,
    **dict.fromkeys(
        (_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default, _aten.var.correction,
         _aten.max.dim, _aten.any.dim, _aten.all.dim, _aten.argmax.default), _reduced
    ),
    _aten.cat.default: _together,
    **dict.fromkeys(
        (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _product
    ),
    _aten.constant_pad_nd.default: _padded,
    _aten.embedding.default: _looked_up,
    **dict.fromkeys(
        (_aten.convolution.default, _aten.native_group_norm.default, _aten.max_pool2d_with_indices.default,
         _aten.avg_pool2d.default, _aten._adaptive_avg_pool2d.default), _first
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten.native_layer_norm.default: _normed,
    _aten._fused_rms_norm.default: _normed,
    **dict.fromkeys((_aten.tril.default, _aten.triu.default), _matrices),
}  # fmt: skip
