"""Kept memory: a tensor that the model's code gives other memory would go unseen, so a capture refuses it.

``t.data = value`` and ``torch.utils.swap_tensors`` are no ops: neither stands in a graph, and later calls would
find the tensor as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gascompile.core.errors import CaptureError

_SWAP = "_swap_tensor_impl"
"""Through which all of torch swaps tensors."""
_DATA = cast(Any, torch.Tensor.data)
_READ, _WRITE = _DATA.__get__, _DATA.__set__


@contextmanager
def memory_kept(model: nn.Module) -> Iterator[None]:
    """Refuse what gives tensors other memory while ``model``'s code runs on this thread.

    Raises:
        CaptureError: names the tensor.
    """
    core = cast(Any, torch._C)
    thread, real = threading.get_ident(), getattr(core, _SWAP)

    def swap(tensor: torch.Tensor, other: torch.Tensor) -> Any:
        if threading.get_ident() != thread:
            return real(tensor, other)
        names = " and ".join(_name(model, one) for one in (tensor, other))
        raise CaptureError(
            f"the code that is captured swaps {names} (torch.utils.swap_tensors), which a planned call would not do "
            "again: copy values instead, by tensor.copy_(value) under torch.no_grad()"
        )

    setattr(core, _SWAP, swap)
    try:
        with _KeptMemory(model):
            yield
    finally:
        setattr(core, _SWAP, real)


class _KeptMemory(TorchFunctionMode):
    """Refuses ``t.data = value``, but for what is in ``t`` already, which it leaves there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What ``t.data`` gave, by identity, with ``t``; kept, as both are told apart by it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _WRITE and isinstance(args[1], torch.Tensor):
            self._require_same(*args)
            return None
        returned = func(*args, **(kwargs or {}))
        if func == _READ:
            self._read[id(returned)] = (returned, args[0])
        return returned

    def _require_same(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        _, owner = self._read.get(id(value), (None, None))
        with torch._C.DisableTorchFunction():
            same_place = value.shape == tensor.shape and value.stride() == tensor.stride()
        if value is tensor or (owner is tensor and same_place):
            return
        name = _name(self._model, tensor)
        raise CaptureError(
            f"the code that is captured assigns the data of {name} (tensor.data = value), which a planned call would "
            "not do again: write tensor.copy_(value) under torch.no_grad(), or compute with a new tensor"
        )


def _name(model: nn.Module, tensor: torch.Tensor) -> str:
    """Return what a model's code calls a tensor, or its shape."""
    for prefix, module in model.named_modules():
        own = (module._parameters, module._buffers, vars(module))
        for name, value in (item for space in own for item in space.items()):
            if value is tensor:
                return f"'{prefix}.{name}'" if prefix else f"'{name}'"
    return f"a tensor of {list(tensor.shape)}"
