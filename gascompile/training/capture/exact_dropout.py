"""Exact dropout: values are scaled as eager scales them, and what is kept of it is one byte an element.

Torch traces dropout as an op that multiplies by a number in float64; eager divides a tensor of the values' own
type by it, which rounds otherwise, by parts of a hundred in bfloat16. Eager keeps that tensor for the backward
pass; it is made of the mask again here.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_aten = torch.ops.aten
_library = torch.library.Library("gascompile_dropout", "DEF")
_library.define(
    "native_dropout(Tensor input, float p) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("native_dropout_backward(Tensor gradient, Tensor mask, float p) -> Tensor")


def _dropout(values: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.empty_like(values).bernoulli_(1 - p)
    mask = noise.bool()
    return noise.div_(1 - p).mul_(values), mask


def _described(values: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _backward(gradient: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    noise = mask.to(gradient.dtype).div_(1 - p)
    # Laid out as a product of both is, without another tensor where that needs none.
    return noise.mul_(gradient) if noise.stride() == gradient.stride() else gradient * noise


_library.impl("native_dropout", _dropout, "CPU")
_library.impl("native_dropout", _described, "Meta")
_library.impl("native_dropout_backward", _backward, "CompositeExplicitAutograd")


def exact_dropout(graph: fx.Graph) -> None:
    """Replace torch's ops: by what draws as eager does, which draws nothing where all is dropped."""
    rate: dict[fx.Node, float] = {}
    for node in list(graph.nodes):
        if node.target is _aten.native_dropout.default:
            values, p, trains = node.args
            if trains and p == 1:
                _drop_all(node)
            elif trains and isinstance(p, float) and 0 < p < 1:
                node.target = torch.ops.gascompile_dropout.native_dropout.default
                node.args = (values, p)
                rate.update(
                    {u: p for u in node.users if u.target is operator.getitem and u.args[1] == 1}
                )
        elif node.target is _aten.native_dropout_backward.default:
            gradient, mask, _ = node.args
            if mask in rate:
                node.target = torch.ops.gascompile_dropout.native_dropout_backward.default
                node.args = (gradient, mask, rate[mask])


def _drop_all(node: fx.Node) -> None:
    """Let a dropout of all values multiply by zero, as eager does, and its mask have none."""
    values, graph = node.args[0], node.graph
    for user in list(node.users):
        kept, meta = user.args[1] == 1, user.meta
        with graph.inserting_before(user):
            if kept:
                made = graph.call_function(
                    _aten.zeros_like.default, (values,), {"dtype": torch.bool}
                )
            else:
                made = graph.call_function(_aten.mul.Scalar, (values, 0.0))
        made.meta = dict(meta)
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)
