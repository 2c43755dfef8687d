"""Guards of compiled models: what happens around calls that no plan knows of."""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from gascompile.api.memory_cells import Cells
from gascompile.core.errors import CompiledModelError


def refuse(why: str, remedy: str) -> NoReturn:
    """Raise ``CompiledModelError`` with a sentence each."""
    raise CompiledModelError(f"this is a compiled model: {why}. {remedy}.")


def require_apart(own: Iterable[Values | None], inputs: Mapping[str, object]) -> None:
    """Return if none of ``inputs``, which a call writes to, lies in the memory of a model's ``own`` values.

    Plans have read those before: they would not see what eager's call sees.

    Raises:
        CompiledModelError: one does.
    """
    known = [values for values in own if values is not None]
    for path, value in inputs.items():
        memory = _memory_of(value) if isinstance(value, torch.Tensor) else 0
        names = [values.lying_in(memory) for values in known if memory in values.memories]
        name = next(filter(None, names), None) if memory else None
        if name is not None:
            refuse(
                f"it writes to its input '{path}', which is memory of the model's own '{name}'",
                "Pass a clone of it",
            )


def _memory_of(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo end its graph before ``function``, and trace nothing that is called by it; return it."""
    assert isinstance(function, types.FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


class Values:
    """Tensors of a model as they are now: which ones, where they lie, and how often they were written to.

    None is kept alive: a model may be sent to the meta device once its weights lie in files.
    """

    def __init__(self, rows: Sequence[_Row], free: Sequence[_Row] = ()) -> None:
        """Know of ``rows`` all that was noted, of ``free`` ones which tensors they are."""
        self._rows, self._free = rows, free
        self._owners = [row.owner for row in (*rows, *free)]
        self._keys = [row.key for row in (*rows, *free)]
        self._tensors = [row.tensor for row in (*rows, *free)]
        self._versions = [row.version for row in rows]
        self._addresses = [row.address for row in rows]
        self._num_none = sum(row.tensor is _nobody for row in free)
        self._cells = Cells([row.tensor() for row in rows])

    @staticmethod
    def of(model: nn.Module, kind: str) -> Values:
        """Take note of all tensors of a kind, ``_parameters`` or ``_buffers``."""
        rows, free = [], []
        for path, module in model.named_modules():
            owner = vars(module)[kind]
            for key, tensor in owner.items():
                name = f"{path}.{key}" if path else key
                if tensor is None or tensor.is_inference():
                    ref = _nobody if tensor is None else weakref.ref(tensor)
                    free.append(_Row(owner, key, name, ref, 0, 0))
                else:
                    now = (tensor._version, _address(tensor))
                    rows.append(_Row(owner, key, name, weakref.ref(tensor), *now))
        return Values(rows, free)

    def read(self, names: Collection[str], written: Collection[str]) -> Values:
        """Return those that a plan reads by their names, and none has; its runs write to some."""
        rows = [row for row in self._rows if row.name in names]
        free = [row for row in self._free if row.tensor is _nobody or row.name in names]
        return Values(
            [row for row in rows if row.name not in written],
            free + [row for row in rows if row.name in written],
        )

    @cached_property
    def memories(self) -> frozenset[int]:
        """Where the memory began that they lay in when this was first asked."""
        held = [row.tensor() for row in (*self._rows, *self._free)]
        return frozenset(_memory_of(tensor) for tensor in held if tensor is not None)

    def lying_in(self, memory: int) -> str | None:
        """Return the name of one that is still there and lies in the memory that begins at ``memory``."""
        for row in (*self._rows, *self._free):
            tensor = row.tensor()
            # A model that was sent to the meta device has given its memory back, to anybody.
            if tensor is not None and _memory_of(tensor) == memory:
                return row.name
        return None

    def changed(self) -> str | None:
        """Return the first that has other values now, in words."""
        now = list(map(dict.get, self._owners, self._keys))
        held = [of() for of in self._tensors]
        # One that is gone, with nothing in its place, is as little there as who has had it.
        num_none = sum(map(operator.is_, now, itertools.repeat(None)))
        if num_none == self._num_none and all(map(operator.is_, now, held)):
            kept: Any = now[: len(self._rows)]
            address = _POINTER if _PLAIN.issuperset(map(type, kept)) else _address
            if (
                list(map(_VERSION, kept)) == self._versions
                and list(map(address, kept)) == self._addresses
            ):
                written = self._cells.changed()
                return None if written is None else f"'{self._rows[written].name}' was written to"
        for number, row in enumerate((*self._rows, *self._free)):
            new, old = now[number], held[number]
            if new is None and row.tensor is not _nobody:
                return f"'{row.name}' is not there any more"
            if new is not old and not (new is not None and new.device.type == "meta"):
                return f"'{row.name}' is another tensor now"
            if new is old and new is not None and number < len(self._rows):
                if new._version != row.version:
                    return f"'{row.name}' was written to"
                if _address(new) != row.address:
                    return f"'{row.name}' has other memory now"
        return None


class _Row(NamedTuple):
    owner: dict[str, torch.Tensor | None]
    key: str
    name: str
    tensor: Callable[[], torch.Tensor | None]
    version: int
    address: int


_VERSION = operator.attrgetter("_version")
_POINTER = torch.Tensor.data_ptr
_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}
"""Others may not say where they lie."""


def _nobody() -> None:
    """Stand for a tensor that is not there."""


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in _PLAIN else 0


def require_no_gradients(
    leaves: Iterable[Any], outputs: tuple[Any, ...], model: nn.Module | None
) -> tuple[Any, ...]:
    """Return ``outputs`` so that a backward pass through them is refused where eager's would give gradients.

    That is to those of ``leaves`` that want some, and to parameters of ``model`` while it is trained: a head that is
    trained on top would leave them as they are, and nothing would say so. In ``eval`` they are taken for features.
    """
    if not torch.is_grad_enabled():
        return outputs
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    sources = [x for x in tensors if x.requires_grad]
    if model is not None and model.training:
        sources += itertools.islice((p for p in model.parameters() if p.requires_grad), 1)
    if not sources:
        return outputs
    # What was passed, and comes back, is as it was; what is returned twice is one tensor.
    known: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for value in outputs:
        is_tensor = isinstance(value, torch.Tensor)
        if (
            is_tensor
            and id(value) not in known
            and (value.is_floating_point() or value.is_complex())
        ):
            known[id(value)] = _Refused.apply(value, *sources)  # type: ignore[no-untyped-call]
    return tuple(known.get(id(value), value) for value in outputs)


class _Refused(torch.autograd.Function):
    """A value that depends on inputs or parameters by no known derivative."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor, *_sources: torch.Tensor) -> torch.Tensor:
        """Return ``value``'s memory as a tensor that is no view, which users may write to."""
        if value.is_conj() or value.is_neg():
            return value.clone()
        apart = value.new_empty(0)
        where = value.untyped_storage(), value.storage_offset()
        return apart.set_(*where, value.shape, value.stride())

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> NoReturn:
        """Raise ``CompiledModelError``."""
        refuse(
            "it computes no gradients, and an input or a parameter wants some",
            "Train with gascompile.compile_step; for results that nothing is to be trained by, call it under "
            "torch.no_grad()",
        )
