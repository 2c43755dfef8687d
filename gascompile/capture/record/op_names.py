"""Names of ops, which torch looks up in its registry at their first use and then keeps in a module's attributes.

A name that is found for the first time is no change: the program sets nothing. And none may be taken away again:
torch lists the names beside the attributes, and an op is known by the object that was made for it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace


def look_up_op(holder: object, name: str) -> None:
    """Let ``torch.ops``, or a namespace of it, have an attribute that it gives when it is asked."""
    if isinstance(holder, _OpNamespace) or holder is torch.ops:
        getattr(holder, name, None)


def look_up_overloads(value: object) -> None:
    """Let an op have all its overloads as attributes."""
    if isinstance(value, OpOverloadPacket):
        for name in value.overloads():
            getattr(value, name, None)


def backward_places(value: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where a custom op, or what stands for it in ``torch.ops``, has the functions of its backward pass."""
    if isinstance(value, OpOverload):
        value = OPDEFS.get(value._schema.name)
    elif isinstance(value, OpOverloadPacket):
        value = OPDEFS.get(value._qualified_op_name)
    if isinstance(value, CustomOpDef):
        for key in ("_setup_context_fn", "_backward_fn"):
            yield vars(value), key


def op_spaces() -> set[int]:
    """Return the identities of the attributes of all namespaces of ops."""
    namespaces: list[Any] = [torch.ops, *vars(torch.ops).values()]
    return {id(vars(space)) for space in namespaces if isinstance(space, types.ModuleType)}
