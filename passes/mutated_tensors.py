"""Which weights and buffers a graph mutates, directly or through a view of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch

_HIDDEN_STATISTICS = {
    # Ops that update running statistics although their schema does not say so: (arguments, flag).
    torch.ops.aten.batch_norm.default: ((3, 4), 5),
    torch.ops.aten.instance_norm.default: ((3, 4), 5),
}


def mutated_tensors(graph: torch.fx.Graph, bindings: Mapping[str, str]) -> frozenset[str]:
    """Return the bound tensors that some op writes, directly or through a view."""
    owners: dict[torch.fx.Node, set[str]] = {}
    mutated: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            owners[node] = {bindings[node.name]} if node.name in bindings else set()
            continue
        inputs = {name for arg in node.all_input_nodes for name in owners[arg]}
        owners[node] = set()
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            owners[node] = inputs
        elif isinstance(node.target, torch._ops.OpOverload):
            mutated |= _written(node, lambda arg: owners[arg])
            if any(value.alias_info is not None for value in node.target._schema.returns):
                owners[node] = inputs
    return frozenset(mutated)


def _written(node: torch.fx.Node, owners: Callable[[torch.fx.Node], set[str]]) -> set[str]:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names: set[str] = set()
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(
            argument.name, node.args[position] if position < len(node.args) else None
        )
        for item in value if isinstance(value, (list, tuple)) else (value,):
            names |= owners(item) if isinstance(item, torch.fx.Node) else set()
    positions, flag = _HIDDEN_STATISTICS.get(target, ((), 0))
    if positions and node.args[flag]:
        for position in positions:
            value = node.args[position]
            names |= owners(value) if isinstance(value, torch.fx.Node) else set()
    return names
