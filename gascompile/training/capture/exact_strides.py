"""Exact strides: results lie as the trace has them, also where torch's own description of an op is wrong.

Some ops lay their result out as another of their operands than their description says, where these lie in different
ways. What follows was traced for the described strides: a view of them may be none of the real ones, and the op that
makes it ends the step. A copy takes the described strides.

[Empirical] torch 2.13, ``softplus_backward``: its result lies as the gradient, and is described to lie as the value.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_MIXED = frozenset(
    {
        "binary_cross_entropy", "binary_cross_entropy_backward", "elu_backward", "hardsigmoid_backward",
        "hardswish_backward", "hardtanh_backward", "logit_backward", "softplus_backward", "xlogy",
    }
)  # fmt: skip
"""Ops whose result lies as they say where all operands of its shape lie alike."""
_ROWS = frozenset(
    {
        "_log_softmax_backward_data", "huber_loss_backward", "mse_loss_backward", "native_dropout_backward",
        "rrelu_with_noise", "smooth_l1_loss_backward",
    }
)  # fmt: skip
"""Ops whose result lies as they say where all of that lie row by row."""
_NAMESPACES = ("aten", "gascompile_dropout")
_FOLLOW = frozenset(
    {
        "alias", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
        "t", "transpose", "unbind", "unsqueeze",
    }
)  # fmt: skip
"""Views of any strides."""
_NEED = frozenset({"_reshape_alias", "_unsafe_view", "as_strided", "unfold", "view"})
"""Views that were found to be some of the described strides."""


def exact_strides(graph: fx.Graph) -> None:
    """Let results of such ops be copied into the strides that they are described with, for views that need them.

    What else reads a result finds it as eager does: sums over values that lie in another way differ in the last bits.
    """
    needing = _needing(graph)
    for node in list(graph.nodes):
        users = [user for user in node.users if user in needing]
        if users and _is_doubtful(node):
            _copy(graph, node, users)


def _is_doubtful(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _NAMESPACES:
        return False
    name, result = target._opname, node.meta.get("val")
    if name not in _MIXED | _ROWS or not isinstance(result, torch.Tensor):
        return False
    operands = [source.meta.get("val") for source in node.all_input_nodes]
    alike = [v for v in operands if isinstance(v, torch.Tensor) and v.shape == result.shape]
    wanted = result.new_empty(result.shape) if name in _ROWS else result
    return any(_strides(value) != _strides(wanted) for value in (*alike, result))


def _needing(graph: fx.Graph) -> set[fx.Node]:
    """Return what reads a value as it lies: views, and what hands it on to them as it lies."""
    needing: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        target = node.target
        name = target._opname if isinstance(target, torch._ops.OpOverload) else ""
        hands_on = target is operator.getitem or name in _FOLLOW or _is_pointwise(target)
        if name in _NEED or (hands_on and not needing.isdisjoint(node.users)):
            needing.add(node)
    return needing


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target._opname in _MIXED | _ROWS
    )


def _strides(value: torch.Tensor) -> list[Any]:
    """Return the strides of dimensions that have more than one element."""
    return [s for size, s in zip(value.shape, value.stride(), strict=True) if size != 1]


def _copy(graph: fx.Graph, node: fx.Node, users: list[fx.Node]) -> None:
    """Copy a result for ``users``, row by row with its dimensions in the order of the described strides."""
    result = node.meta["val"]
    order = sorted(range(result.ndim), key=lambda d: (-result.stride(d), -result.shape[d]))
    if not _is_dense(result, order):
        return
    back = [order.index(dim) for dim in range(result.ndim)]
    with graph.inserting_after(node):
        turned = graph.call_function(_aten.permute.default, (node, order))
    with graph.inserting_after(turned):
        how: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copied = graph.call_function(_aten.clone.default, (turned,), how)
    with graph.inserting_after(copied):
        last = graph.call_function(_aten.permute.default, (copied, back))
    for made in (turned, copied, last):
        # What it is of, as whether it is of the backward pass.
        made.meta = {key: value for key, value in node.meta.items() if key != "val"}
    turned.meta["val"] = result.permute(order)
    copied.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
    last.meta["val"] = copied.meta["val"].permute(back)
    for user in users:
        user.replace_input_with(node, last)


def _is_dense(value: torch.Tensor, order: list[int]) -> bool:
    turned = value.permute(order)
    wanted = [math.prod(turned.shape[dim + 1 :]) for dim in range(value.ndim)]
    return _strides(turned) == [
        s for size, s in zip(turned.shape, wanted, strict=True) if size != 1
    ]
