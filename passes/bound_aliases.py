"""Which weights and buffers each value of a graph may share memory with."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch


def bound_aliases(
    graph: torch.fx.Graph, bindings: Mapping[str, str]
) -> dict[torch.fx.Node, frozenset[str]]:
    """Return the bound tensors that each node's value is, or may be a view of, by the ops' schemas."""
    owners: dict[torch.fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = bindings.get(node.name)
            owners[node] = frozenset() if name is None else frozenset((name,))
        elif node.op == "call_function":
            owners[node] = frozenset()
            if _may_return_a_view(node.target):
                owners[node] = frozenset(n for arg in node.all_input_nodes for n in owners[arg])
    return owners


def _may_return_a_view(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return any(value.alias_info is not None for value in target._schema.returns)
    return target is operator.getitem
