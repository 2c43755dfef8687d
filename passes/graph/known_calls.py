"""Known calls: what an op returns on fake tensors, and what was recorded of it, for the next call of the same kind.

A model's layers ask for the same ops on tensors of the same layouts. What a fake of one of torch's own ops returns
depends on these alone, if it writes to nothing: which results are views of which operands included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils import _pytree as pytree

from gascompile.passes.graph.mutated_tensors import written_arguments

Recorded = TypeVar("Recorded")

_OWN = ("aten", "prims")
"""Namespaces of ops that are known to look at layouts alone."""
_CONSTANTS = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _OtherError(Exception):
    """An operand or a result is none of those by which calls are told apart."""


def leaves_of(value: Any) -> list[Any]:
    """Return what is in lists, tuples and dictionaries of any depth, as torch's trees do that know of more kinds."""
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves_of(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    return [value]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a result lies, and in the storage of which operand if in none of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None


@dataclass(frozen=True, slots=True)
class _Known(Generic[Recorded]):
    results: list[_Layout | None]
    spec: pytree.TreeSpec
    recorded: Recorded


@dataclass(slots=True)
class KnownCall:
    """An op with what it is given, as far as its results depend on that."""

    key: object
    operands: list[FakeTensor] = field(default_factory=list)


class KnownCalls(Generic[Recorded]):
    """Calls under one mode, with what was recorded of the first of each kind."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[object, _Known[Recorded]] = {}

    def call_of(
        self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> KnownCall | None:
        """Return what tells the call of ``node`` from others; ``None`` where that is more than layouts."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _OWN:
            return None
        if target._schema.is_mutable or written_arguments(node):
            return None
        call = KnownCall(None)
        storages: dict[int, int] = {}
        try:
            given = _described((args, tuple(sorted(kwargs.items()))), call.operands, storages)
        except _OtherError:
            return None
        call.key = target, given
        return call

    def again(self, call: KnownCall) -> tuple[Any, Recorded] | None:
        """Return the value of a call of a known kind, and what was recorded of the first."""
        known = self._known.get(call.key)
        if known is None:
            return None
        values = [layout and self._made(layout, call.operands) for layout in known.results]
        return pytree.tree_unflatten(values, known.spec), known.recorded

    def note(self, call: KnownCall, value: Any, recorded: Recorded) -> None:
        """Remember the value of a call, unless it is made of more than whole storages and views of operands."""
        operands = {t.untyped_storage()._cdata: i for i, t in enumerate(call.operands)}
        results, spec = pytree.tree_flatten(value)
        try:
            layouts = [_layout(result, operands) for result in results]
        except _OtherError:
            return
        own = {
            result.untyped_storage()._cdata
            for result, layout in zip(results, layouts, strict=True)
            if layout is not None and layout.view_of is None
        }
        if len(own) == sum(layout is not None and layout.view_of is None for layout in layouts):
            self._known[call.key] = _Known(layouts, spec, recorded)

    def _made(self, layout: _Layout, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Return a fake that lies as the one of the first call did, as torch makes it of its own memory of calls."""
        shape, stride = layout.shape, layout.stride
        empty = torch.empty_strided(shape, stride, dtype=layout.dtype, device="meta")
        if layout.view_of is not None:
            storage = operands[layout.view_of].untyped_storage()
            with in_kernel_invocation_manager(self._mode):
                empty.set_(storage, layout.offset, shape, stride)
        return FakeTensor(self._mode, empty, layout.device)


def _described(value: Any, operands: list[FakeTensor], storages: dict[int, int]) -> object:
    if type(value) is FakeTensor:
        operands.append(value)
        storage = value.untyped_storage()
        return (
            *_lies(value),
            storage.nbytes(),
            storages.setdefault(storage._cdata, len(storages)),
            value.requires_grad,
        )
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_described(part, operands, storages) for part in value)
    if isinstance(value, _CONSTANTS):
        return type(value), value
    raise _OtherError


def _lies(value: FakeTensor) -> tuple[object, ...]:
    shape, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
    if not all(type(number) is int for number in (*shape, *stride, offset)):
        raise _OtherError
    if value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        raise _OtherError
    return shape, stride, offset, value.dtype, value.fake_device


def _layout(result: Any, operands: Mapping[int, int]) -> _Layout | None:
    if result is None:
        return None
    if type(result) is not FakeTensor or result.requires_grad:
        raise _OtherError
    shape, stride, offset, dtype, device = _lies(result)
    storage = result.untyped_storage()
    view_of = operands.get(storage._cdata)
    if view_of is None:
        likeness = torch.empty_strided(shape, stride, dtype=dtype, device="meta")  # type: ignore[arg-type]
        if offset or likeness.untyped_storage().nbytes() != storage.nbytes():
            raise _OtherError
    return _Layout(shape, stride, offset, dtype, device, view_of)  # type: ignore[arg-type]
