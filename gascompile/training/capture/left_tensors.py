"""Left tensors: what a trace assigns to attributes has no values, so nobody finds it there afterwards.

Those of the model's modules are looked at, and those of objects that compute the loss.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

_log = logging.getLogger("gascompile")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def leaves_no_traced(
    capture: Callable[Concatenate[nn.Module, Callable[..., Any], _P], _T],
) -> Callable[Concatenate[nn.Module, Callable[..., Any], _P], _T]:
    """Let attributes be what they were before ``capture`` where they hold traced tensors after it."""

    @functools.wraps(capture)
    def captured(
        model: nn.Module, loss_fn: Callable[..., Any], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        holders = [*model.named_modules(), *((type(of).__name__, of) for of in _of_loss(loss_fn))]
        before = [(name, vars(of), dict(vars(of))) for name, of in holders]
        try:
            return capture(model, loss_fn, *args, **kwargs)
        finally:
            left = [text for row in before for text in _restored(*row)]
            if left:
                _log.warning(
                    "%s: the code that is captured sets %s to tensors that it computes, which planned steps do not; "
                    "what is read afterwards is as it was before. Return such tensors, or keep them in buffers",
                    type(model).__name__,
                    ", ".join(left),
                )

    return captured


def _of_loss(loss_fn: Callable[..., Any]) -> Iterator[Any]:
    """Yield the objects that a loss is, is a method of, or is given for good."""
    todo: list[Any] = [loss_fn]
    for of in todo:
        if isinstance(of, functools.partial):
            todo += [of.func, *of.args, *of.keywords.values()]
        elif isinstance(of, types.MethodType):
            todo.append(of.__self__)
        elif hasattr(of, "__dict__") and not isinstance(of, (nn.Module, type, types.ModuleType)):
            yield of


def _restored(name: str, space: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Put back what a module had, and return the names of what it had not, or another."""
    missing = object()
    changed = [
        key
        for key, value in space.items()
        if value is not before.get(key, missing) and _is_traced(value)
    ]
    for key in changed:
        if key in before:
            space[key] = before[key]
        else:
            del space[key]
    return [f"{name}.{key}" if name else key for key in changed]


def _is_traced(value: object) -> bool:
    """Return whether there are tensors of a trace in a value."""
    return any(
        isinstance(leaf, (FakeTensor, FunctionalTensor))
        or (
            isinstance(leaf, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        )
        for leaf in pytree.tree_leaves(value)
    )
