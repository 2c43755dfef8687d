"""Functions of a twin: copies of those that hold parts of the model, as ``lambda x: self.layer(x)`` in an attribute.

``copy.deepcopy`` leaves functions and weak references as they are. In a twin they would go on with the model itself,
and a trace would take the values of its weights for constants. Nor does it copy a tensor that was computed with
gradients, as a module that keeps what it computed last has one.
"""

from __future__ import annotations

import copy
import gc
import logging
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gascompile.core.tensor_attributes import share_attributes

_log = logging.getLogger("gascompile")
_APART = (type, types.ModuleType, types.CodeType, types.FrameType, torch.Tensor)
"""What is looked into by nobody: classes and modules are everybody's, and tensors hold no functions."""


class TwinMemo(dict[int, Any]):
    """What ``copy.deepcopy`` is given: copies by the identity of what they are of, of functions when they are met."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._computed: dict[int, torch.Tensor] = {}
        reaching = self._reached(model)
        kinds = (types.FunctionType, weakref.ref)
        self._to_copy = {id(x): x for x in reaching.values() if isinstance(x, kinds)}
        self._reaching = reaching

    def get(self, key: int, default: Any = None) -> Any:
        """Return the copy of what has this identity."""
        if key in self._computed and key not in self:
            real = self._computed[key]
            copied = copy.deepcopy(real.detach(), self).requires_grad_()
            share_attributes(real, copied)
            self[key] = copied
        if key in self._to_copy and key not in self:
            before, of = set(self), self._to_copy[key]
            try:
                self._copy(key, of)
            except Exception:  # noqa: BLE001 - whatever the classes of what it holds raise when copied, as locks do
                # It goes on with the model itself, whose weights are told by where they lie.
                _log.debug("%r is not copied for tracing", of, exc_info=True)
                for made in self.keys() - before:
                    del self[made]
                self[key] = of
        return super().get(key, default)

    def _reached(self, model: nn.Module) -> dict[int, Any]:
        """Return, by identity, all that the model holds and that leads to a module of it; note what was computed."""
        todo: list[Any] = [model]
        seen, holders = {id(model): model}, dict[int, list[int]]()
        while todo:
            holder = todo.pop()
            for part in _parts(holder):
                # By its type alone: some objects answer whatever they are asked.
                if type(part) is torch.Tensor and part.grad_fn is not None:
                    self._computed[id(part)] = part
                if issubclass(type(part), _APART):
                    continue
                holders.setdefault(id(part), []).append(id(holder))
                if id(part) not in seen:
                    seen[id(part)] = part
                    todo.append(part)
        found: dict[int, Any] = {}
        ids = [id(module) for module in model.modules()]
        while ids:
            for holder in holders.get(ids.pop(), ()):
                if holder not in found:
                    found[holder] = seen[holder]
                    ids.append(holder)
        return found

    def _copy(self, key: int, of: Any) -> None:
        if isinstance(of, weakref.ref):
            self[key] = weakref.ref(copy.deepcopy(of(), self))
            return
        inside = tuple(map(self._cell, of.__closure__ or ()))
        made = types.FunctionType(of.__code__, of.__globals__, of.__name__, None, inside)
        self[key] = made  # before its parts, which may hold it
        made.__qualname__, made.__module__ = of.__qualname__, of.__module__
        made.__doc__, made.__annotations__ = of.__doc__, of.__annotations__
        made.__defaults__ = copy.deepcopy(of.__defaults__, self)
        made.__kwdefaults__ = copy.deepcopy(of.__kwdefaults__, self)
        made.__dict__.update(copy.deepcopy(vars(of), self))
        for was, cell in zip(of.__closure__ or (), inside, strict=True):
            if cell is not was:
                cell.cell_contents = copy.deepcopy(was.cell_contents, self)

    def _cell(self, of: types.CellType) -> types.CellType:
        """Return the same variable, where it holds nothing of the model: whoever sets it is seen."""
        made: types.CellType = self.setdefault(id(of), types.CellType())
        return made if id(of) in self._reaching else of


def _parts(of: Any) -> Iterable[Any]:
    """Return what an object holds by itself."""
    if isinstance(of, types.FunctionType):
        return (*(of.__closure__ or ()), of.__defaults__, of.__kwdefaults__, vars(of))
    if isinstance(of, weakref.ref):
        return (of(),)
    return gc.get_referents(of)
