"""The forward that a model was given with, for a model whose calls were led to what was compiled from it.

``model.forward = lambda *a, **k: compiled(*a, **k)`` puts the compiled model in the place of the model's own code.
That code is still what is captured; it is put back for as long as the model is looked at.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_NONE = object()
_DEEPEST = 6
"""Functions in functions in the place of a forward are looked through so far."""


class GivenForward:
    """What the attribute ``forward`` of a model was when it was compiled."""

    def __init__(self, model: nn.Module | None) -> None:
        """Note it; a bundle, which knows no model, has none."""
        self._attributes = {} if model is None else vars(model)
        self._given = self._attributes.get("forward", _NONE)

    def changed(self) -> str | None:
        """Return that the model has another forward now, in words; to be asked within ``beside``."""
        now = self._attributes.get("forward", _NONE)
        return None if now is self._given else "the model has another forward now"

    def counting(self, runner: object) -> Any:
        """Return what is set on the model in the place of its class's forward, if that does not lead to ``runner``.

        Returns ``None`` where nothing is set.
        """
        now = self._attributes.get("forward", _NONE)
        if now is not self._given and _leads_to(now, runner, _DEEPEST):
            now = self._given
        return None if now is _NONE else now

    @contextmanager
    def beside(self, runner: object) -> Iterator[None]:
        """Have the given forward back meanwhile, if the one of now leads to ``runner``; any other one counts."""
        now = self._attributes.get("forward", _NONE)
        if now is self._given or not _leads_to(now, runner, _DEEPEST):
            yield
            return
        self._set(self._given)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, forward: object) -> None:
        if forward is _NONE:
            self._attributes.pop("forward", None)
        else:
            self._attributes["forward"] = forward


def _leads_to(value: Any, runner: object, depth: int) -> bool:
    """Return whether a function is seen to call a compiled model, by what it is bound to and what it names."""
    if isinstance(value, nn.Module):
        return vars(value).get("_gascompile") is runner
    if depth == 0:
        return False
    return any(_leads_to(part, runner, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            # A cell may not have been given its value yet.
            yield getattr(cell, "cell_contents", None)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        names = value.__code__.co_names
        yield from (value.__globals__[name] for name in names if name in value.__globals__)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
