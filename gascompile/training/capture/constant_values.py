"""Constant values: what integers that depend on neither batch nor model are, while a loss is traced.

Libraries decide over such tensors: whether ``arange`` counts up by one, for example, and so whether a mask is needed.
A trace knows no values, so that it would have to take another way than eager does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_FACTORIES = frozenset({"arange", "full", "ones", "zeros"})
_FOLLOWED = _FACTORIES | frozenset(
    {
        "__add__", "__and__", "__eq__", "__ge__", "__getitem__", "__gt__", "__invert__", "__le__", "__lt__", "__mul__",
        "__ne__", "__or__", "__radd__", "__rmul__", "__rsub__", "__sub__", "add", "all", "any", "bool", "cat", "cumsum",
        "diff", "eq", "expand", "flatten", "ge", "gt", "int", "le", "logical_and", "logical_not", "logical_or", "long",
        "lt", "mul", "ne", "repeat", "reshape", "select", "squeeze", "sub", "sum", "unsqueeze", "view",
    }
)  # fmt: skip
"""Functions of integers whose results are the same at every call."""
_DECISIONS = frozenset({"__bool__", "__index__", "__int__", "item"})
_WRITES = frozenset({"__iadd__", "__iand__", "__imul__", "__ior__", "__isub__", "__setitem__"})
_MOST_ELEMENTS = 1 << 20
"""Of a tensor whose values are computed while a step is captured."""
_NOTHING = object()


class ConstantValues:
    """Knows the values of some traced tensors; a write to any tensor makes it forget all of them."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Traced tensor and value, by the ``id`` of the former, which is kept for it."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``func`` returns in the trace; what it decides over a known value is decided by that."""
        name = getattr(func, "__name__", "")
        if name in _DECISIONS and args and id(args[0]) in self._values:
            return _really(func, self._values[id(args[0])][1])
        result = func(*args, **kwargs)
        if self._may_write(func, name, kwargs):
            self._values.clear()
        elif name in _FOLLOWED and isinstance(result, torch.Tensor):
            value = self._value(func, name, args, kwargs, result)
            if value is not _NOTHING:
                self._values[id(result)] = (result, value)
        return result

    @staticmethod
    def _may_write(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
        """Return whether a function may write to a tensor, whichever: views of known ones need not be known."""
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return True
        in_place = name.endswith("_") and not name.endswith("__")
        return in_place or name in _WRITES or kwargs.get("out") is not None

    def _value(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> Any:
        """Return the value of a result; ``_NOTHING`` where it is not known, or no integer of the processor."""
        if result.is_floating_point() or result.is_complex() or result.device.type != "cpu":
            return _NOTHING
        if not isinstance(result.numel(), int) or result.numel() > _MOST_ELEMENTS:
            return _NOTHING
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not (tensors or name in _FACTORIES) or any(id(x) not in self._values for x in tensors):
            return _NOTHING
        real = pytree.tree_map_only(torch.Tensor, lambda x: self._values[id(x)][1], (args, kwargs))
        value = _really(func, *real[0], **real[1])
        same = value.shape == result.shape and value.dtype == result.dtype
        return value if same else _NOTHING


def _really(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``func`` on real tensors, outside of the trace."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        return func(*args, **kwargs)
