"""Guards of compiled models: what happens around calls that no plan knows of."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from gascompile.core.errors import CompiledModelError


def refuse(why: str, remedy: str) -> NoReturn:
    """Raise ``CompiledModelError`` with a sentence each."""
    raise CompiledModelError(f"this is a compiled model: {why}. {remedy}.")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo end its graph before ``function``, and trace nothing that is called by it; return it."""
    assert isinstance(function, types.FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


class Parameters:
    """The parameters of a model as they are now: which tensors, and how often they were written to.

    None is kept alive: a model may be sent to the meta device once its weights lie in files.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._names: list[str] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._versions: list[int] = []
        for path, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.append(module._parameters)
                    self._keys.append(key)
                    self._names.append(f"{path}.{key}" if path else key)
                    self._tensors.append(weakref.ref(parameter))
                    self._versions.append(_version(parameter))

    def changed(self) -> str | None:
        """Return the first that has other values now, in words."""
        now = list(map(dict.get, self._owners, self._keys))
        held = [of() for of in self._tensors]
        if all(map(operator.is_, now, held)) and list(map(_version, now)) == self._versions:
            return None
        for name, new, old, version in zip(self._names, now, held, self._versions, strict=True):
            if new is not old and not (new is not None and new.device.type == "meta"):
                return f"'{name}' is another tensor now"
            if new is old and _version(new) != version:
                return f"'{name}' was written to"
        return None


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def require_no_gradients(leaves: Iterable[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``outputs`` so that a backward pass through them to one of ``leaves`` is refused."""
    if not torch.is_grad_enabled():
        return outputs
    sources = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    if not sources:
        return outputs
    return tuple(
        _Refused.apply(value, *sources)  # type: ignore[no-untyped-call]
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in outputs
    )


class _Refused(torch.autograd.Function):
    """A value that depends on inputs by no known derivative."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor, *_sources: torch.Tensor) -> torch.Tensor:
        """Return ``value``."""
        return value.view_as(value)

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> NoReturn:
        """Raise ``CompiledModelError``."""
        refuse(
            "it computes no gradients, and an input wants some",
            "Train with gascompile.compile_step, or detach() the inputs",
        )
