"""Program specs: what a step's program says of its tensors, and without which ops it does as well."""

from __future__ import annotations

import torch
from torch import fx

from gascompile.core.program import BoundSpec, InputSpec, draws
from gascompile.distributed.stage_ops import is_of_stages
from gascompile.training.optimizers import update_ops


def bound_spec(node: fx.Node) -> BoundSpec:
    """Return what a bound tensor is."""
    value = node.meta["val"]
    return BoundSpec(dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))


def input_spec(node: fx.Node, number: int) -> InputSpec:
    """Return what an input is, the ``number``-th."""
    value = node.meta.get("val")
    path = f"inputs[{number}]"
    if not isinstance(value, torch.Tensor):
        return InputSpec(name=node.name, path=path, constant=repr(value))
    dtype = str(value.dtype).removeprefix("torch.")
    return InputSpec(name=node.name, path=path, dtype=dtype, shape=tuple(value.shape))


def remove_unused(graph: fx.Graph) -> None:
    """Erase ops whose results nobody reads and that change nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        target = node.target
        mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        mutable = mutable or target is update_ops.refuse_nan or is_of_stages(target)
        if not mutable and not draws(node.target):
            graph.erase_node(node)
