"""Own weights: constants of a trace that are the model's parameters or buffers after all.

Code may reach the model past its twin: by a global variable, or an object that is not copied with it. What it reads is
a tensor of the model as any other then, and no constant of the program. Values in Python, and what is written there, no
graph would show: they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from gascompile.capture.fake_twin import canonical_names
from gascompile.core.errors import CaptureError

_VALUES = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
    }
)
_WRITES = frozenset(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)) | {"__setitem__"}  # fmt: skip


def own_weights(constants: Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """Return the first name in the model of every constant that is a parameter or buffer of it, by its own name."""
    if not constants:
        return {}
    named = canonical_names(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {_place(tensor): named[name] for name, tensor in tensors.items()}
    places.pop(None, None)
    return {
        name: places[place]
        for name, value in constants.items()
        if isinstance(value, torch.Tensor) and (place := _place(value)) in places
    }


class OnlyComputed(TorchFunctionMode):
    """Refuses code that, while a twin is traced, takes a value of the model itself into Python, or writes to it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {
            id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch passes it
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = self._names.get(id(args[0])) if args else None
        if name is not None:
            called = getattr(func, "__name__", "")
            writes = called in _WRITES or (called.endswith("_") and not called.endswith("__"))
            if writes or called in _VALUES:
                raise CaptureError(
                    f"the model's code {'writes to' if writes else 'takes the value of'} '{name}' ({called}), which "
                    "it reaches past self: by a global variable, or by a function or an object that cannot be copied. "
                    "Reach it by self, and a plan follows"
                )
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> Hashable | None:
    """Return where a tensor lies and how, or ``None`` for one without values."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return None
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    how = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, *where, *how
