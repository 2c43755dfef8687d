"""Rows: which dimension of each tensor of a program has the rows of the batch.

Followed from the batch's tensors, op by op, by rules for ops that are known; where none holds, nothing is said. An
axis says where the elements of a row lie, not that nothing else has gone into them; see ``rows_apart`` for that. That
no other dimension follows the number of rows is for who asks to see, by shapes for another number of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.passes.parallel.row_indices import row_of_indices


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension whose coordinates are rows, ``repeat`` in turn for each row, and all of that ``above`` times."""

    dim: int
    repeat: int = 1
    above: int = 1

    def at(self, dim: int) -> Axis:
        """Return it in another dimension."""
        return replace(self, dim=dim)


class Other(Enum):
    """What is known of a tensor without rows."""

    SAME = "made of the model's values alone: every rank has the same, whatever its rows"
    FREE = "not made of the batch, but its shape may follow the number of rows"
    UNKNOWN = "not known"


State = Axis | Other
States = State | list[State]
SAME, FREE, UNKNOWN = Other.SAME, Other.FREE, Other.UNKNOWN

_MAY_GROW = frozenset({"expand", "repeat"})
"""Ops that take sizes, which may be the number of rows."""
_LIKE = frozenset(
    {
        "_to_copy", "alias", "bernoulli", "clone", "detach", "empty_like", "exponential", "fill", "full_like",
        "index_add", "index_copy", "index_fill", "index_put", "lift_fresh_copy", "masked_fill", "masked_scatter",
        "native_dropout", "normal_functional", "ones_like", "rand_like", "randint_like", "randn_like", "scatter",
        "scatter_add", "scatter_reduce", "tril", "triu", "uniform", "zeros_like",
    }
)  # fmt: skip
"""Ops whose result has the elements of their first operand."""
_REDUCTIONS = frozenset(
    {
        "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm", "logsumexp", "max",
        "mean", "median", "min", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
    }
)  # fmt: skip
_ALONG = frozenset(
    {
        "_log_softmax", "_safe_softmax", "_softmax", "cumprod", "cumsum", "flip", "gather", "glu", "index_select",
        "logcumsumexp", "roll", "sort", "topk",
    }
)  # fmt: skip
"""Ops along dimensions of their first operand, which leave the others as they are."""
_MOVING = frozenset(
    {
        "expand", "select", "slice", "split", "split_with_sizes", "squeeze", "unbind", "unsafe_split", "unsqueeze",
    }
)  # fmt: skip
"""Ops whose result has another number of dimensions, or a part of one."""
_PER_SAMPLE = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_native_batch_norm_legit_no_training",
        "_scaled_dot_product_flash_attention_for_cpu", "_upsample_bilinear2d_aa", "adaptive_max_pool2d", "avg_pool1d",
        "avg_pool2d", "avg_pool3d", "constant_pad_nd", "convolution", "grid_sampler_2d", "im2col",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "native_group_norm", "pixel_shuffle", "pixel_unshuffle",
        "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "upsample_bicubic2d",
        "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    }
)  # fmt: skip
"""Ops of samples in their first dimension, each by itself."""
LOSSES = frozenset(  # have rows where they do not reduce them
    {
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "l1_loss", "mse_loss",
        "nll_loss2d_forward", "nll_loss_forward", "smooth_l1_loss", "soft_margin_loss",
    }
)  # fmt: skip
_KNOWN = ("aten", "gascompile_dropout")  # namespaces
_END = (1 << 63) - 1
"""Of a slice that goes to the end."""
_VIEWS = {"_reshape_alias", "_reshape_copy", "_unsafe_view", "reshape", "view", "view_copy"}


def name_of(target: object) -> str:
    """Return an op's name without its overload; empty for other functions, and for ops of which nothing is known."""
    is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in _KNOWN
    return cast(torch._ops.OpOverload, target)._opname if is_known else ""


def is_pointwise(target: object) -> bool:
    """Return whether an op computes each element from those in its place."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def shape_of(node: object) -> list[int]:
    """Return the shape of a node's tensor, the first of several."""
    values = pytree.tree_leaves(node.meta.get("val")) if isinstance(node, fx.Node) else ()
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return list(first.shape) if first is not None else []


def argument_of(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return an argument of an op by its name in the op's schema."""
    target = cast(torch._ops.OpOverload, node.target)
    for number, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            if number < len(node.args):
                return node.args[number]
            return node.kwargs.get(name) if name in node.kwargs else argument.default_value
    return default


def row_axes(
    graph: fx.Graph,
    batch: Collection[fx.Node],
    rows: int,
    given: Mapping[fx.Node, State],
    is_believed: Callable[[fx.Node, Mapping[fx.Node, States], Axis], bool] | None = None,
) -> dict[fx.Node, States]:
    """Return what is known of each node of a graph; of a tuple, of each of its elements.

    Args:
        graph: of a step's forward and backward pass.
        batch: placeholders of the batch's tensors that have rows.
        rows: their number.
        given: what is known of other nodes.
        is_believed: asked of each axis that is found, with what is known so far; by default all are.
    """
    states: dict[fx.Node, States] = {}
    for node in graph.nodes:
        if node in given:
            states[node] = given[node]
        elif node.op == "placeholder":
            states[node] = Axis(0) if node in batch else SAME
        elif node.op == "call_function":
            state = _Rules(node, states, rows).state()
            axis = next(iter(state), None) if isinstance(state, list) else state
            if is_believed and isinstance(axis, Axis) and not is_believed(node, states, axis):
                state = [UNKNOWN] * len(state) if isinstance(state, list) else UNKNOWN
            states[node] = state
    return states


class _Rules:
    """What is known of the result of one op."""

    def __init__(self, node: fx.Node, known: Mapping[fx.Node, States], rows: int) -> None:
        self._node, self._known, self._rows = node, known, rows
        self._name = name_of(node.target)
        self._shape = shape_of(node)

    def state(self) -> States:
        node = self._node
        if node.target is operator.getitem:
            of = self._known[cast(fx.Node, node.args[0])]
            return of[cast(int, node.args[1])] if isinstance(of, list) else of
        count = len(node.meta["val"]) if isinstance(node.meta.get("val"), (list, tuple)) else 0
        states = [self._known[source] for source in node.all_input_nodes]
        flat = [s for state in states for s in (state if isinstance(state, list) else [state])]
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target.namespace == "gascompile_ranks"
        ):
            known: State = SAME  # sums over all ranks
        elif self._name.startswith("new_"):
            known = FREE
        elif any(isinstance(state, Axis) for state in flat):
            known = self._of_rows()
        elif UNKNOWN in flat:
            known = UNKNOWN
        else:
            is_same = flat and FREE not in flat and self._name not in _MAY_GROW
            known = SAME if is_same and self._is_no_larger() else FREE
        if isinstance(known, Axis) and self._name.startswith("nll"):
            return [known, SAME]  # a weight that is 0
        return [known] * count if count else known

    def _is_no_larger(self) -> bool:
        """Return whether a view has no more elements than what it is of, as one with strides of 0 has."""
        if self._name != "as_strided":
            return True
        return prod(self._shape) <= prod(shape_of(self._node.args[0]))

    def _of_rows(self) -> State:
        """Return the axis of an op's result, one of whose operands has rows."""
        name = self._name
        if is_pointwise(self._node.target):
            return self._broadcast(self._node.all_input_nodes)
        for names, rule in _RULES:
            if name in names:
                return rule(self)
        return UNKNOWN

    def _axis(self, number: int = 0) -> Axis | None:
        """Return the axis of an argument."""
        args = self._node.args
        node = args[number] if number < len(args) else None
        state = self._known.get(node) if isinstance(node, fx.Node) else None
        return state if isinstance(state, Axis) else None

    def _argument(self, name: str, default: Any = None) -> Any:
        return argument_of(self._node, name, default)

    def _dims(self, *names: str) -> list[int] | None:
        """Return the dimensions that an op names, of its first operand; ``None`` for all of them."""
        given = next((v for v in map(self._argument, names) if v is not None), None)
        if given is None or given == []:
            return None
        rank = max(len(shape_of(self._node.args[0])), 1)
        return [dim % rank for dim in ([given] if isinstance(given, int) else given)]

    def _broadcast(self, operands: Sequence[fx.Node]) -> State:
        axes = set()
        for operand in operands:
            state = self._known[operand]
            if isinstance(state, Axis):
                axes.add(state.at(state.dim + len(self._shape) - len(shape_of(operand))))
        return axes.pop() if len(axes) == 1 else UNKNOWN

    def _like(self) -> State:
        return self._axis() or UNKNOWN

    def _written(self) -> State:
        """Return the axis of a tensor into which another one is written, in whole or along a dimension."""
        axis, source, into = self._axis(), self._axis(1), shape_of(self._node.args[0])
        if axis is not None or source is None or self._name == "select_scatter":
            return axis or UNKNOWN
        given = shape_of(self._node.args[1])
        is_beside = len(given) == len(into) and given[source.dim] == into[source.dim]
        along = self._dims("dim") or []
        return source if is_beside and source.dim not in along else UNKNOWN

    def _view(self) -> State:
        axis, before = self._axis(), shape_of(self._node.args[0])
        if axis is None or not prod(self._shape):
            return UNKNOWN
        outer = prod(before[: axis.dim]) * axis.above
        inner = prod(before[axis.dim + 1 :]) * axis.repeat
        for dim, size in enumerate(self._shape):
            above, odd = divmod(outer, prod(self._shape[:dim]))
            repeat, rest = divmod(inner, prod(self._shape[dim + 1 :]))
            if not odd and not rest and above * self._rows * repeat == size:
                return Axis(dim, repeat, above)
        return UNKNOWN

    def _permuted(self) -> State:
        axis = self._axis()
        if axis is None:
            return UNKNOWN
        count = len(self._shape)
        order = list(range(count))
        if self._name == "permute":
            order = [dim % count for dim in self._argument("dims")]
        elif count > 1:
            first, second = (
                (0, 1)
                if self._name == "t"
                else (self._argument("dim0") % count, self._argument("dim1") % count)
            )
            order[first], order[second] = order[second], order[first]
        return axis.at(order.index(axis.dim))

    def _moved(self) -> State:
        """Return the axis of what has a dimension more or less, or part of one."""
        axis, before, shape = self._axis(), shape_of(self._node.args[0]), self._shape
        if axis is None:
            return UNKNOWN
        dim = axis.dim
        if self._name == "expand":
            dim += len(shape) - len(before)
        elif self._name == "unsqueeze":
            dim += self._argument("dim") % len(shape) <= dim
        elif self._name == "squeeze":
            gone = self._dims("dim") or range(len(before))
            dim -= sum(d < axis.dim and before[d] == 1 for d in gone)
        elif self._name in ("select", "unbind"):
            (gone_dim,) = self._dims("dim") or [0]
            if gone_dim == axis.dim:
                return UNKNOWN
            dim -= gone_dim < axis.dim
        elif self._name == "slice" and self._argument("dim") % len(shape) == dim:
            # A part that happens to be all of these rows would be another one of more.
            is_all = not self._argument("start") and self._argument("end") in (None, _END)
            return axis if is_all and self._argument("step") == 1 else UNKNOWN
        is_whole = dim < len(shape) and shape[dim] == before[axis.dim]
        return axis.at(dim) if is_whole else UNKNOWN

    def _joined(self) -> State:
        operands = cast(list[fx.Node], self._node.args[0])
        dim = cast(int, self._argument("dim") or 0) % len(self._shape)
        states = [self._known[operand] for operand in operands]
        axes = {state for state in states if isinstance(state, Axis)}
        if len(axes) != 1:
            return UNKNOWN
        axis = axes.pop()
        if self._name == "stack":
            return axis.at(axis.dim + (dim <= axis.dim))
        if dim != axis.dim:
            return axis
        is_all = all(state == axis for state in states)
        return replace(axis, above=axis.above * len(states)) if is_all else UNKNOWN

    def _reduced(self) -> State:
        axis, dims = self._axis(), self._dims("dim")
        if axis is None or dims is None or axis.dim in dims:
            return UNKNOWN
        if self._argument("keepdim", False):
            return axis
        return axis.at(axis.dim - sum(dim < axis.dim for dim in dims))

    def _along(self) -> State:
        axis, dims = self._axis(), self._dims("dim", "dims")
        if axis is None and self._name == "gather" and len(shape_of(self._node.args[0])) == 1:
            return self._axis(2) or UNKNOWN
        if axis is None or dims is None or axis.dim in dims:
            return UNKNOWN
        kept = len(self._shape) > axis.dim and (
            self._shape[axis.dim] == shape_of(self._node.args[0])[axis.dim]
        )
        return axis if kept else UNKNOWN

    def _product(self) -> State:
        first = 1 if self._name.startswith(("addmm", "baddbmm")) else 0
        left, right = self._axis(first), self._axis(first + 1)
        if self._name in ("bmm", "baddbmm"):
            axis = left or right
            if axis is not None and axis.dim == 0:
                return axis if right in (None, axis) else UNKNOWN
            return left if left is not None and left.dim == 1 and right is None else UNKNOWN
        return left if left is not None and left.dim == 0 and right is None else UNKNOWN

    def _per_sample(self) -> State:
        axis = self._axis()
        of_all = all(a is None or a.dim == 0 for a in map(self._axis, range(len(self._node.args))))
        return axis if axis and axis.dim == 0 and of_all else UNKNOWN

    def _normalised(self) -> State:
        axis, count = self._axis(), len(self._argument("normalized_shape"))
        is_outside = axis and axis.dim < len(shape_of(self._node.args[0])) - count
        return axis if axis and is_outside else UNKNOWN

    def _unreduced(self) -> State:
        axis, is_counted = self._axis(1), self._name.startswith("nll")
        if self._argument("reduction") or (is_counted and axis != self._axis()):
            return UNKNOWN
        known = axis if is_counted else self._broadcast(self._node.all_input_nodes)
        return UNKNOWN if known is None or (is_counted and axis and axis.dim) else known

    def _looked_up(self) -> State:
        if self._name == "embedding":
            return (self._axis(1) or UNKNOWN) if self._axis(0) is None else UNKNOWN
        axis, indices = self._axis(0), cast(list[Any], self._node.args[1])
        if axis is not None:
            at = [dim for dim, index in enumerate(indices) if index is not None]
            if axis == Axis(0) and at[0] == 0:
                states = [self._known.get(index) for index in indices]
                places = [of.dim if isinstance(of, Axis) else None for of in states]
                own = row_of_indices(indices, places, self._rows)
                is_one = all(of == Axis(of.dim) for of in states if isinstance(of, Axis))
                is_known = is_one and UNKNOWN not in states
                return Axis(own) if own is not None and is_known else UNKNOWN
            # Those that are not side by side would come first in the result.
            is_after = at[0] > axis.dim and at == list(range(at[0], at[-1] + 1))
            return axis if is_after else UNKNOWN
        only = self._known.get(indices[0]) if len(indices) == 1 else None
        return only if isinstance(only, Axis) else UNKNOWN


_RULES: tuple[tuple[Collection[str], Callable[[_Rules], State]], ...] = (
    (_LIKE, _Rules._like),
    (frozenset({"copy", "select_scatter", "slice_scatter"}), _Rules._written),
    (_VIEWS, _Rules._view),
    (frozenset({"permute", "t", "transpose"}), _Rules._permuted),
    (_MOVING, _Rules._moved),
    (frozenset({"cat", "stack"}), _Rules._joined),
    (_REDUCTIONS, _Rules._reduced),
    (_ALONG, _Rules._along),
    (frozenset({"addmm", "baddbmm", "bmm", "mm"}), _Rules._product),
    (_PER_SAMPLE, _Rules._per_sample),
    (frozenset({"_fused_rms_norm", "native_layer_norm"}), _Rules._normalised),
    (LOSSES, _Rules._unreduced),
    (frozenset({"embedding", "index"}), _Rules._looked_up),
)
