"""Stand-ins: what is asked in the place of an object that answers with a new one each time, or by a method."""

from __future__ import annotations

import contextvars
import enum
import os
import types
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch

from gascompile.capture.record.likeness import GONE
from gascompile.core.tensor_attributes import attributes_of

_PLAIN_LOOKUPS = (dict.__getitem__, OrderedDict.__getitem__)


class Current:
    """What a context variable is set to, as an attribute."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.of = variable

    @property
    def value(self) -> Any:
        """Return it, or ``GONE``."""
        return self.of.get(GONE)

    @value.setter
    def value(self, value: object) -> None:
        if value is not GONE:
            self.of.set(value)


class Unfilled:
    """What a slot that is empty will hold, as an attribute."""

    def __init__(self, owner: Any, key: str) -> None:
        self._owner, self._key = owner, key

    @property
    def value(self) -> Any:
        """Return it, or ``GONE``."""
        return getattr(self._owner, self._key, GONE)

    @value.setter
    def value(self, value: object) -> None:
        if value is not GONE:
            setattr(self._owner, self._key, value)
        elif self.value is not GONE:
            delattr(self._owner, self._key)


def slot_of(owner: Any, key: str, name: str) -> tuple[Any, str, str]:
    """Return whose attribute is watched for a slot, which one, and its name."""
    if hasattr(owner, key):
        return owner, key, name
    return Unfilled(owner, key), "value", f"{name}['value']"


class HeldEntries:
    """What is in a list or a set, or the keys of a dictionary, in words, as an attribute."""

    def __init__(self, of: Collection[Any]) -> None:
        self.of, self._text = of, ""

    @property
    def value(self) -> str:
        """Return it, the same object as long as nothing changes."""
        held = [*dict.keys(self.of)] if isinstance(self.of, dict) else [*self.of]
        text = repr(sorted(map(repr, held)) if isinstance(self.of, set) else held)
        if text != self._text:
            self._text = text
        return self._text


class SetOnTensor:
    """Names of what a program has set on a tensor, as an attribute; what an open step sets there is left out."""

    def __init__(self, of: torch.Tensor) -> None:
        self._of = of
        self._names: tuple[str, ...] = ()

    @property
    def value(self) -> tuple[str, ...]:
        """Return them, the same object as long as nothing changes."""
        names = tuple(sorted(attributes_of(self._of)))
        if names != self._names:
            self._names = names
        return self._names


ASKED = (Current, HeldEntries)
"""Stand-ins for what is looked at as a whole."""


class Variable:
    """What an environment variable is set to, as an attribute: bytes, or ``None``."""

    def __init__(self, name: str) -> None:
        self._key = os.environ.encodekey(name)

    @property
    def value(self) -> Any:
        """Return it, the same object as long as nobody sets it."""
        return os.environ._data.get(self._key)  # type: ignore[attr-defined]


class ReadFile:
    """Which file lies where one was read, in words, as an attribute; what is written to it shows in its times."""

    def __init__(self, path: str) -> None:
        self._path, self._text = path, ""

    @property
    def value(self) -> str:
        """Return it, the same object as long as nothing changes."""
        try:
            found = os.stat(self._path)
            text = f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
        except OSError:
            text = "not there"
        if text != self._text:
            self._text = text
        return self._text


class StoredItems:
    """What a dictionary holds, where asking it for an item makes a new one each time."""

    def __init__(self, of: dict[Any, Any]) -> None:
        self.of = of

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self.of, key)

    def __len__(self) -> int:
        return len(self.of)


def stored_items(of: dict[Any, Any]) -> Any:
    """Return what gives what a dictionary holds: mostly itself."""
    return of if type(of).__getitem__ in _PLAIN_LOOKUPS else StoredItems(of)


_CODE = (types.FunctionType, staticmethod, classmethod, property)


def held_by(value: object) -> tuple[Any, ...] | None:
    """Return what a method, a property, a reference that does not count or an enumeration stands for, or ``None``."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, enum.EnumMeta):
        bases = [base for base in value.__mro__ if not issubclass(base, enum.Enum)]
        code = [own for own in vars(value).values() if isinstance(own, _CODE)]
        return (*value.__members__.values(), *code, *bases)
    return None
