"""Which weights and buffers a graph mutates, directly or through a view of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gascompile.core.program import Program
from gascompile.passes.graph.bound_aliases import bound_aliases

_HIDDEN_STATISTICS = {
    # Ops that update running statistics although their schema does not say so: (arguments, flag if any).
    torch.ops.aten.batch_norm.default: ((3, 4), 5),
    torch.ops.aten.instance_norm.default: ((3, 4), 5),
    torch.ops.aten.batch_norm_update_stats.default: ((1, 2), None),
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten._batch_norm_impl_index.default: ((3, 4), 5),
}

_TOLD = frozenset({"aten", "prim", "prims", "_c10d_functional", "quantized", "inductor"})
"""Namespaces whose ops say in their schemas and tags what they do beside returning values."""


def mutated_tensors(graph: torch.fx.Graph, bindings: Mapping[str, str]) -> frozenset[str]:
    """Return the bound tensors that some op writes, directly or through a view."""
    owners = bound_aliases(graph, bindings)
    return frozenset(
        name
        for node in graph.nodes
        for argument in written_arguments(node)
        for name in owners[argument]
    )


def has_effect(node: torch.fx.Node) -> bool:
    """Return whether an op counts though nobody reads its result.

    So do those that keep statistics unseen, and the user's own, which may draw random numbers without saying so.
    """
    target = node.target
    is_custom = isinstance(target, torch._ops.OpOverload) and target.namespace not in _TOLD
    return is_custom or node.is_impure() or bool(written_arguments(node))


def written_inputs(program: Program) -> frozenset[str]:
    """Return the placeholders of the user inputs that some op writes, directly or through a view."""
    names = {spec.name: spec.name for spec in program.inputs if spec.dtype is not None}
    return mutated_tensors(program.graph_module.graph, names)


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the operands that an op writes to; of what is no op, none."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    positions = [
        i
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    statistics, flag = _HIDDEN_STATISTICS.get(target, ((), None))
    if flag is None or _given(node, target, flag):
        positions += statistics
    written = []
    for position in positions:
        value = _given(node, target, position)
        items = value if isinstance(value, (list, tuple)) else (value,)
        written += [item for item in items if isinstance(item, torch.fx.Node)]
    return written


def _given(node: torch.fx.Node, target: torch._ops.OpOverload, position: int) -> object:
    """Return an argument, which may stand by its name."""
    name = target._schema.arguments[position].name
    return node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
