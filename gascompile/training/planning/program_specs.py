"""Program specs: what a step's program says of its tensors, and without which ops it does as well."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import BoundSpec, InputSpec, Program, draws
from gascompile.distributed.stage_ops import is_of_stages
from gascompile.training.optimizers import update_ops

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint


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


def program_of(joint: Joint, graph: fx.Graph, results: Collection[fx.Node], name: str) -> Program:
    """Return a joint's graph, or a copy of it, as a program with ``results``; the graph has another output then."""
    graph.output_node().args = (tuple(results),)
    nodes = {node.name: node for node in graph.nodes}
    inputs = (*joint.inputs, *joint.outside)
    first = next(node for node in nodes.values() if node.op != "placeholder")
    for placeholder in (*joint.bound, *inputs):
        first.prepend(nodes[placeholder])
    own = joint.graph_module
    return Program(
        name=name,
        graph_module=own if graph is own.graph else fx.GraphModule(own, graph),
        inputs=tuple(input_spec(nodes[node], i) for i, node in enumerate(inputs)),
        bindings=joint.bound,
        bound={of: bound_spec(nodes[placeholder]) for placeholder, of in joint.bound.items()},
        states=frozenset(),
        in_spec=pytree.treespec_dumps(pytree.tree_structure((inputs, {}))),
        out_spec=pytree.treespec_dumps(pytree.tree_structure(tuple(results))),
    )


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
