"""Kept state: what an unplanned optimizer keeps, as tensors and JSON of a checkpoint, and read from one.

A value that is a tensor, or plain, has a place of its own. Lists, tuples and dicts of such are written as they are
made, with numbers where their tensors stand; classes derived from these come back as what they are derived from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.training.state.extra_values import decoded, encoded
from gascompile.training.state.open_optimizer import listed
from gascompile.training.state.pieces import Stored
from gascompile.training.state.tensor_files import Entry, of_tensor

Row = list[Any]
"""Parameter's number, key and value; of a value that is made of others also ``_MADE``."""
_PREFIX = "state:"
"""What names of an optimizer's tensors begin with in a checkpoint."""
_MADE, _TENSOR, _WHOLE = "made", "$tensor", ""
_SCALARS = (type(None), bool, int, float, str)


def kept_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Entry]:
    """Return the tensors of an optimizer's state, for a file.

    Raises:
        UnsupportedOpError: there is more in it than tensors, plain values, and lists, tuples and dicts of such.
    """
    return {name: of_tensor(tensor) for name, tensor in _parts(optimizer)[0].items()}


def kept_values(optimizer: torch.optim.Optimizer) -> list[Row]:
    """Return the rest of the state, for JSON."""
    return _parts(optimizer)[1]


def _parts(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[Row]]:
    tensors: dict[str, torch.Tensor] = {}
    rows: list[Row] = []
    for index, key, value in _items(listed(optimizer)["state"]):
        if isinstance(value, torch.Tensor) and _is_of(index, key):
            tensors[f"{_PREFIX}{index}:{key}"] = value
        elif isinstance(value, _SCALARS) and _is_finite(value) and _is_of(index, key):
            rows.append([index, key, _plain(value)])
        else:
            inner: list[torch.Tensor] = []
            where = f"the state of {type(optimizer).__name__} has under '{key or index}'"
            try:
                made, _ = encoded({"": _without(value, inner, where)})
            except ValueError as error:
                raise _refusal(where, str(error)) from None
            name = f"{_PREFIX}{len(rows)}#"
            tensors |= {f"{name}{number}": tensor for number, tensor in enumerate(inner)}
            rows.append([index, key, made[""], _MADE])
    return tensors, rows


def _items(state: Mapping[Any, Any]) -> Iterator[tuple[int | str, str, Any]]:
    """Yield what is kept: the number of the parameter, or a name of the optimizer's own, key and value."""
    for index, entry in state.items():
        if not isinstance(index, int | str) or isinstance(index, bool):
            raise _refusal(
                "the state of the optimizer has", f"a key that is a {type(index).__name__}"
            )
        if isinstance(index, int) and not isinstance(entry, dict):
            raise _refusal(
                f"the state of parameter {index} is",
                f"a {type(entry).__name__} in the place of a dict",
            )
        if isinstance(entry, dict) and all(isinstance(key, str) and key != _WHOLE for key in entry):
            yield from ((index, key, value) for key, value in entry.items())
        else:
            yield index, _WHOLE, entry


def _without(value: Any, inner: list[torch.Tensor], where: str) -> Any:
    """Return a value with numbers in the place of its tensors, which are added to ``inner``."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        inner.append(value)
        return {_TENSOR: len(inner) - 1}
    if isinstance(value, list | tuple):
        items = [_without(item, inner, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if kind is Counter:
        return value
    if isinstance(value, dict) and _TENSOR not in value:
        return {key: _without(item, inner, where) for key, item in value.items()}
    if isinstance(value, _SCALARS):
        return _plain(value)
    raise _refusal(where, f"a {kind.__module__}.{kind.__qualname__}")


def _is_of(index: int | str, key: str) -> bool:
    """Return whether something is kept of a parameter, under a key."""
    return isinstance(index, int) and key != _WHOLE


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return a value as Python's own, as NumPy's numbers and members of enumerations of whole numbers are."""
    if type(value) in _SCALARS:
        return value
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def _refusal(where: str, what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{where} {what}, which checkpoints of a step do not hold; save step.state_dict() by torch.save, and give that "
        "to step.load_state_dict()"
    )


class KeptState:
    """An optimizer's state in a checkpoint, which alone knows what it consists of."""

    def __init__(self, stored: Mapping[str, Stored], rows: list[Row]) -> None:
        """Take what ``kept_tensors`` has left in files, and ``kept_values``; tensors come with ``entries``.

        Raises:
            CheckpointError: a tensor has a dtype that is unknown, or is of nothing.
        """
        self._rows = rows
        self._own: dict[tuple[int, str], torch.Tensor] = {}
        self._inner: dict[tuple[int, int], torch.Tensor] = {}
        self.entries: dict[str, Entry] = {}
        for name, source in stored.items():
            if name.startswith(_PREFIX):
                number, mark, key = name.removeprefix(_PREFIX).partition(":")
                if mark and _is_number(number):
                    self._expect(name, source, _setter(self._own, (int(number), key)))
                    continue
                number, mark, key = name.removeprefix(_PREFIX).partition("#")
                if not (mark and _is_number(number) and _is_number(key)):
                    raise CheckpointError(f"'{name}' of the checkpoint is of no parameter")
                self._expect(name, source, _setter(self._inner, (int(number), int(key))))

    def _expect(self, name: str, source: Stored, assign: Callable[[torch.Tensor], None]) -> None:
        dtype = getattr(torch, source.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"'{name}' of the checkpoint is {source.dtype}, which is unknown")
        self.entries[name] = Entry(dtype=dtype, shape=source.shape, assign=assign)

    @property
    def state(self) -> dict[int | str, Any]:
        """What an optimizer loads, once all tensors have come.

        Raises:
            CheckpointError: one is missing.
        """
        state: dict[int | str, Any] = {}
        for number, (index, key, value, *made) in enumerate(self._rows):
            whole = self._with(number, _decoded(value)) if made else value
            if made and key == _WHOLE:
                state[index] = whole
            else:
                state.setdefault(index, {})[key] = whole
        for (index, key), tensor in self._own.items():
            state.setdefault(index, {})[key] = tensor
        return state

    def _with(self, row: int, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._with(row, item) for item in value)
        if type(value) is not dict:
            return value
        if value.keys() != {_TENSOR}:
            return {key: self._with(row, item) for key, item in value.items()}
        if (row, value[_TENSOR]) not in self._inner:
            raise CheckpointError(
                f"the checkpoint lacks tensor {value[_TENSOR]} of the optimizer's state"
            )
        return self._inner[row, value[_TENSOR]]


def _decoded(value: Any) -> Any:
    try:
        return decoded(value)
    except ValueError as error:
        raise CheckpointError(f"the optimizer's state is damaged: {error}") from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _setter(held: dict[Any, torch.Tensor], key: tuple[int, Any]) -> Callable[[torch.Tensor], None]:
    return lambda value: held.__setitem__(key, value)


def is_row(value: object) -> bool:
    """Return whether a value of a file may be a row of ``kept_values``."""
    if not (isinstance(value, list) and len(value) in (3, 4) and isinstance(value[1], str)):
        return False
    if len(value) == 4:
        return value[3] == _MADE and type(value[0]) in (int, str)
    return type(value[0]) is int and 0 <= value[0] < 1 << 62
