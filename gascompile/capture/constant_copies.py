"""Constant copies: ops read the constants of a graph where they are.

``torch.tensor`` in a model's code is a constant of the trace, of which the graph makes a copy at each call, as eager
makes a new tensor. Where ops only read the copy, the constant itself does.
"""

from __future__ import annotations

import torch

from gascompile.passes.graph.mutated_tensors import written_arguments

_COPY = torch.ops.aten.lift_fresh_copy.default
_SAME = torch.ops.aten.detach_.default


def drop_constant_copies(graph: torch.fx.Graph) -> None:
    """Remove copies of constants that nothing writes to, returns, or takes a view of."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _COPY:
            continue
        copies = [node]
        for copy in copies:
            copies += [user for user in copy.users if user.target is _SAME]
        readers = {user for copy in copies for user in copy.users} - set(copies)
        if not all(map(_only_reads, readers)):
            continue
        for copy in reversed(copies):
            copy.replace_all_uses_with(node.args[0])
            graph.erase_node(copy)


def _only_reads(node: torch.fx.Node) -> bool:
    """Return whether an op neither writes to what it is given nor returns any of it."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return not written_arguments(node) and not any(r.alias_info is not None for r in returns)
