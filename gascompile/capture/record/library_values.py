"""Library values: the numbers, words and flags that a library's code reads, where a program may set others.

A library's own functions set them, as ``attention_backend`` of diffusers does, or anybody who knows their names. What a
capture itself changes, as libraries count calls, warn once and remember what they have found, is none of them.
"""

from __future__ import annotations

import contextvars
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from gascompile.capture.fingerprint.code_names import absolute_name, names_of
from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file, origin_of_name
from gascompile.capture.record.likeness import GONE, SCALARS, same
from gascompile.capture.record.stand_ins import (
    ASKED,
    Current,
    HeldEntries,
    StoredItems,
    stored_items,
)

_MANY_ENTRIES = 256
"""A larger table is a register of all that a library has, and no choice that is made in a call."""
_FIXED = (tuple, frozenset)
_LISTS = (list, set, deque)
_TABLES = (dict, types.SimpleNamespace, *_LISTS)
"""What settings are kept in that have a name of their own, or one of a class or of another table."""

_LAYERS = "torch/nn/modules/"
_VERSIONED = {Origin.INSTALLED, Origin.TORCH}

Place = tuple[Any, Any, str]
"""What to ask, for what, and what to call the answer."""
Steady = Callable[[Any, Any], bool]
"""Tells of a place, by what to ask and for what, whether it is what it was before the capture."""


def is_plain_value(value: object) -> bool:
    """Return whether a value is a scalar, or made of scalars for good."""
    if isinstance(value, tuple | frozenset) and type(value) in _FIXED:
        return all(is_plain_value(inner) for inner in value)
    return isinstance(value, SCALARS)


def plain_places(
    value: object,
    name: str,
    reads: Callable[[str], bool],
    *,
    is_inner: bool = False,
    owners: set[int] | None = None,
) -> Iterator[Place]:
    """Yield where in a library's value plain values stand that are read.

    Args:
        value: what stands under a name that a library's code reads.
        name: what to call it.
        reads: whether an attribute of this name is read.
        is_inner: whether it stands in another value, of which tables alone are looked into.
        owners: takes the identities of all that is looked into.
    """
    looked = set() if owners is None else owners
    if isinstance(value, types.ModuleType) or type(value) in _FIXED:
        return
    if isinstance(value, contextvars.ContextVar):
        if is_plain_value(value.get(None)):
            yield Current(value), "value", f"{name}['value']"
        return
    if isinstance(value, _LISTS) and type(value) in _LISTS:
        if len(value) <= _MANY_ENTRIES and all(map(is_plain_value, [*value])):
            looked.add(id(value))
            yield HeldEntries(value), "value", f"what is in {name}"
        return
    if isinstance(value, Mapping):
        # What is stored: some tables import all that a library has where anybody asks for their items.
        entries = [*dict.items(value)] if isinstance(value, dict) else []
        if isinstance(value, dict) and len(entries) <= _MANY_ENTRIES:
            looked.add(id(value))
            # A table of anything else is mostly a register, which fills up.
            if all(is_plain_value(part) for entry in entries for part in entry):
                yield HeldEntries(value), "value", f"the keys of {name}"
            for key, held in entries:
                if not is_plain_value(key):
                    continue
                if is_plain_value(held):
                    yield stored_items(value), key, f"{name}[{key!r:.40}]"
                elif isinstance(held, _TABLES) and not is_inner:
                    yield from plain_places(
                        held, f"{name}[{key!r:.40}]", reads, is_inner=True, owners=looked
                    )
        return
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    spaces: list[Mapping[str, Any]] = [_space(kind) for kind in kinds if _is_installed(kind)]
    is_known = _is_installed(type(value)) or isinstance(value, types.SimpleNamespace)
    if not isinstance(value, type) and is_known and hasattr(value, "__dict__"):
        spaces.append(vars(value))
    for space in spaces:
        looked.add(id(space))
        for key, held in [*space.items()]:
            if _is_special(key) or not reads(key):
                continue
            if is_plain_value(held):
                yield space, key, f"{name}.{key}"
            elif isinstance(held, _TABLES) and not is_inner:
                yield from plain_places(held, f"{name}.{key}", reads, is_inner=True, owners=looked)


def followed(space: Mapping[str, Any], chain: Sequence[str]) -> tuple[Any, str, Any]:
    """Return what holds the value that a dotted name leads to as far as it goes through modules, its key, and it."""
    owner, key, value = space, "", None
    for part in chain:
        owner, key, value = space, part, space.get(part)
        if not isinstance(value, types.ModuleType):
            break
        space = vars(value)
    return owner, key, value


class FirstSeen:
    """What library code found under its names when it first ran in a capture."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, object], tuple[Any, Any]] = {}
        """By what was asked, which is kept, and for what."""
        self._owners: set[int] = set()
        self._none: dict[tuple[int, str], Any] = {}
        """Where ``None`` was: what was asked, which is kept, by the same."""
        self._there: set[tuple[int, str]] = set()
        """What was looked at before."""

    def note(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """Take note of what ``code`` finds, which is about to run."""
        path = code.co_filename
        origin = origin_of_file(path)
        if origin not in _VERSIONED:
            return
        names = names_of(code)
        found = [followed(space, chain) for chain in names.chains]
        for owner, key, value in found:
            if value is None and key in owner and (id(owner), key) not in self._there:
                self._none[id(owner), key] = owner
            self._there.add((id(owner), key))
        if origin is not Origin.INSTALLED and _LAYERS not in path:
            return
        for taken in names.imports:
            module = sys.modules.get(absolute_name(taken, space))
            if module is not None:
                found += [followed(vars(module), (name,)) for name in taken.names or ()]
        for owner, key, value in found:
            if is_plain_value(value) and key in owner:
                self._values.setdefault((id(owner), key), (owner, value))
            for held, inner, _ in plain_places(value, "", _any, owners=self._owners):
                self._values.setdefault(place_key(held, inner), (held, asked(held, inner)))

    def is_steady(self, owner: Any, key: Any) -> bool:
        """Return whether what is there was there before the capture, and is what it was, as far as anybody looked."""
        _, before = self._values.get(place_key(owner, key), (None, GONE))
        if before is GONE:
            return place_key(owner, key)[0] not in self._owners
        now = asked(owner, key)
        return now is before or same(before, now)

    def was_none(self, owner: Any, key: str) -> bool:
        """Return whether ``None`` is known to have been in a place before the capture."""
        return (id(owner), key) in self._none


def _any(_: str) -> bool:
    return True


def place_key(owner: Any, key: Any) -> tuple[int, object]:
    """Return what tells a place from all others, however it is asked."""
    return id(owner.of if isinstance(owner, (*ASKED, StoredItems)) else owner), key


def asked(owner: Any, key: Any) -> Any:
    """Return what is in a place."""
    return owner.value if isinstance(owner, ASKED) else owner[key]


_spaces: WeakKeyDictionary[type, Mapping[str, Any]] = WeakKeyDictionary()


def _space(kind: type) -> Mapping[str, Any]:
    """Return the attributes of a class, the same object each time."""
    return _spaces.setdefault(kind, vars(kind))


def _is_installed(kind: type) -> bool:
    return origin_of_name(kind.__module__) is Origin.INSTALLED


def _is_special(key: object) -> bool:
    return not isinstance(key, str) or (key.startswith("__") and key.endswith("__"))
