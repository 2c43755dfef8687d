"""Effect tokens: checks of torch's linear algebra, which a trace orders by tokens, become part of what they check.

``torch.linalg.inv`` computes ``linalg_inv_ex``, which says in numbers whether it could, and raises by another op
that has no result. With ``check_errors=True`` the first raises by itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors

from gascompile.core.errors import CaptureError

_CHECK = torch.ops.aten._linalg_check_errors.default
_TOKENS = (
    descriptors.ForwardTokenAOTInput,
    descriptors.BackwardTokenAOTInput,
    descriptors.ForwardTokenAOTOutput,
    descriptors.BackwardTokenAOTOutput,
)


def drop_tokens(graph: fx.Graph) -> None:
    """Let a graph take and return no tokens.

    Raises:
        CaptureError: an op has another effect than to raise where linear algebra finds no result; names it.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.with_effects:
            _join(node)
            token = node.args[0]
            for user in list(node.users):
                user.replace_all_uses_with(token)
                graph.erase_node(user)
            graph.erase_node(node)
    output = graph.output_node()
    (values,), told = output.args, output.meta["desc"]
    kept = [k for k, desc in enumerate(told) if not isinstance(desc, _TOKENS)]
    if len(kept) < len(told):
        output.args = ([values[k] for k in kept],)  # type: ignore[index]
        output.meta["desc"] = [told[k] for k in kept]
    for node in list(graph.nodes):
        if node.op == "placeholder" and isinstance(node.meta["desc"], _TOKENS):
            graph.erase_node(node)


def _join(node: fx.Node) -> None:
    """Let what a check looks at raise by itself."""
    _, op, *args = node.args
    checked = _checked(args[0]) if op is _CHECK else None
    if checked is None:
        raise CaptureError(
            f"the loss calls {op}, whose effect has no place in a plan; compute without it, as by the function of "
            "torch.linalg whose name ends in _ex"
        )
    checked.kwargs = {**checked.kwargs, "check_errors": True}


def _checked(info: Any) -> fx.Node | None:
    """Return the op which says by ``info`` whether it had a result, if it can raise itself."""
    while isinstance(info, fx.Node) and info.target in _SAME:
        info = info.args[0]
    if not isinstance(info, fx.Node) or not isinstance(info.target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in info.target._schema.arguments]
    return info if "check_errors" in names else None


_SAME = (operator.getitem, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
