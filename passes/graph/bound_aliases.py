"""Which weights and buffers each value of a graph may share memory with."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


def bound_aliases(
    graph: torch.fx.Graph, bindings: Mapping[str, str]
) -> dict[torch.fx.Node, frozenset[str]]:
    """Return the bound tensors that each node's value is, or may be a view of.

    Schemas say so, but for composite ops such as ``einsum``, whose traced results tell by their memory.
    """
    owners: dict[torch.fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = bindings.get(node.name)
            owners[node] = frozenset() if name is None else frozenset((name,))
        elif node.op == "call_function":
            owners[node] = frozenset(
                name
                for argument in node.all_input_nodes
                if owners[argument] and may_share_memory(node, argument)
                for name in owners[argument]
            )
    return owners


def may_share_memory(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """Return whether what an op returns may be an argument of it, or a view of one."""
    if _converts(node, argument):
        return False
    return _may_return_a_view(node, argument) or _shares_memory(node, argument)


def _converts(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """Return whether a conversion that may return its argument gives values of another type, in memory of their own."""
    if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.to:
        return False
    given, made = argument.meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return given.dtype != made.dtype


def _may_return_a_view(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """Return whether an op's schema says so: of ``copy_``, for what it writes to and not for what it reads."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    kinds = [value.alias_info for value in target._schema.returns]
    returned = set().union(*(kind.before_set for kind in kinds if kind is not None))
    if not returned:
        return False
    for position, spec in enumerate(target._schema.arguments):
        if spec.alias_info is not None and not returned.isdisjoint(spec.alias_info.before_set):
            positional = node.args[position] if position < len(node.args) else None
            value = node.kwargs.get(spec.name, positional)
            if value is argument or (isinstance(value, (list, tuple)) and argument in value):
                return True
    return False


def _shares_memory(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    if node.target is torch.ops.aten.lift_fresh_copy.default:
        return False  # a trace alone does without the copy
    given = _memory(argument)
    return bool(given) and not given.isdisjoint(_memory(node))


def _memory(node: torch.fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    # Values of transforms such as vmap, and sparse ones, have no memory of their own.
    return {
        v.untyped_storage()._cdata
        for v in values
        if isinstance(v, FakeTensor) and v.layout is torch.strided
    }
