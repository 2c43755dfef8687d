"""Drop what an exported graph holds and eager does not compute."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from gascompile.capture.constant_copies import drop_constant_copies
from gascompile.passes.graph.mutated_tensors import has_effect

_ASSERTS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
_CASTS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh_copy.default,
}
_NEW_OBJECTS = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
"""They return another tensor of the same memory, which has a shape of its own."""
_MAY_RETURN_OPERANDS = {
    getattr(torch.ops.aten, name)
    for name in (
        "contiguous", "to", "type_as", "resolve_conj", "resolve_neg", "real", "conj", "positive",
        "atleast_1d", "atleast_2d", "atleast_3d",
    )
}  # fmt: skip
_DROPOUTS = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
}
"""They return their input where they drop nothing, and a copy in a trace."""


def drop_no_ops(graph: torch.fx.Graph) -> None:
    """Remove assertions and what returns its input; eager does not compute them either."""
    _drop(graph, frozenset())
    _drop(graph, _NEW_OBJECTS)
    drop_constant_copies(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)


def _drop(graph: torch.fx.Graph, new_objects: Collection[Any]) -> None:
    """Remove what returns its input; what returns another tensor of its memory is told once all else is gone."""
    kept = _kept(graph) if new_objects else set()
    for node in list(graph.nodes):
        if node.target in _NEW_OBJECTS and node.target not in new_objects:
            continue
        if node.target in _ASSERTS:
            graph.erase_node(node)
        elif node.target in _DROPOUTS and (not node.args[1] or node.args[2] is False):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node in kept:
            continue
        elif node.target in _CASTS and isinstance(node.args[0], torch.fx.Node):
            before, after = node.args[0].meta.get("val"), node.meta.get("val")
            forced = node.kwargs.get("copy") or True in node.args[1:]
            if (
                isinstance(before, torch.Tensor)
                and isinstance(after, torch.Tensor)
                and not forced
                and before.dtype == after.dtype
                and before.device == after.device
                and before.stride() == after.stride()
                and (node.target is not torch.ops.aten.lift_fresh_copy.default)
            ):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _kept(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the ops that return another tensor of the same memory, where it is told from the first one.

    The caller may be given both, and what changes the shape of one in place leaves that of the other.
    """
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes):
        return {node for node in graph.nodes if node.target in _NEW_OBJECTS}
    returned = {_itself(node) for node in graph.output_node().all_input_nodes}
    return {node for node in returned if node.target in _NEW_OBJECTS}


def _itself(node: torch.fx.Node) -> torch.fx.Node:
    """Return what made the tensor that ``node`` returns, past ops that return their operand, or may."""
    while isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        written = [i for i, of in enumerate(schema.arguments) if of.is_write]
        returns = [of.alias_info for of in schema.returns]
        is_itself = len(returns) == 1 and returns[0] is not None and returns[0].is_write
        is_itself = is_itself and written == [0]
        is_itself = is_itself or node.target.overloadpacket in _MAY_RETURN_OPERANDS
        operand = node.args[0] if is_itself and node.args else None
        if not isinstance(operand, torch.fx.Node):
            break
        node = operand
    return node
