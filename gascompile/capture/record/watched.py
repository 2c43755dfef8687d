"""Watched values: plain Python values with the places they were read from, and which of them are others now.

All are compared by identity in three passes of C code; only where one differs is it looked at by value.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gascompile.capture.fingerprint.code_origin import key_of
from gascompile.capture.record.asked_settings import AskedSetting
from gascompile.capture.record.contents import (
    ARRAYS,
    bytes_of,
    digest_of,
    elements_of,
    is_plain,
    raw_of,
)
from gascompile.capture.record.likeness import GONE, alike, same, shown
from gascompile.capture.record.stand_ins import ReadFile, SetOnTensor, StoredItems, Variable

Columns = tuple[list[Any], list[Any], list[Any], list[Any]]
"""Owners, keys, values and names of what is watched."""

Place = tuple[dict[str, Any], str, str]
"""A dictionary, a key of it, and what it is called."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALWAYS = {"forward", "training", "__call__", "__defaults__", "__kwdefaults__", "_modules", *HOOKS}
_MAX_ARRAY_BYTES = 1 << 20
"""Of an array that is kept to be compared; of larger ones a digest is."""
_MANY_KEYS = 256  # of larger ones, mostly tables that are asked, the order is not compared: that is done at each call
_ENTRY = re.compile(r"(\[[^\]]*\])+$")


@dataclass(frozen=True, slots=True)
class Reads:
    """Which values count: of what ran, by what it reads."""

    names: frozenset[str] | None
    """Attributes that are read; ``None`` for all."""
    ran: frozenset[str] | None
    """Functions that ran, as ``key_of`` names them; ``None`` for all that can be reached."""

    def has(self, name: object) -> bool:
        """Return whether an attribute is read."""
        if self.names is None or not isinstance(name, str):
            return True
        return name in self.names or name in _ALWAYS

    def reach(self, name: str, key: object) -> bool:
        """Return whether a place is read: an attribute by its name, an entry where its container is, a variable."""
        if key == "cell_contents" or " in " in name:
            return True
        return self.has(_leaf(name) if name.endswith("]") else key)

    def calls(self, code: types.CodeType) -> bool:
        """Return whether a function ran."""
        return self.ran is None or key_of(code) in self.ran


@dataclass(frozen=True, slots=True)
class WatchedChange:
    """A value that is another one now."""

    name: str
    key: object
    """Under which its owner has it."""
    text: str


class Watches:
    """Values with the places they were read from."""

    def __init__(self, *, versions: bool, reads: Reads | None = None) -> None:
        """Take nothing yet.

        Args:
            versions: whether tensors are baked in, so that writing to one counts.
            reads: which attributes count that objects get later; none by default.
        """
        self._versions, self._reads = versions, reads
        self._items: Columns = ([], [], [], [])
        self._attributes: Columns = ([], [], [], [])
        self._sizes: tuple[list[Any], list[int], list[str]] = ([], [], [])
        self._length = 0
        self._tensors: tuple[list[torch.Tensor], list[int], list[str]] = ([], [], [])
        self._arrays: list[tuple[Any, bytes, str]] = []
        self._large: list[tuple[Any, bytes, str]] = []
        """By their digest."""
        self._contents: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        """Small tensors, with their bytes."""
        self._kinds: tuple[list[Any], list[type], list[str]] = ([], [], [])
        """Objects with their classes."""
        self._orders: tuple[list[Any], list[list[Any]], list[str]] = ([], [], [])
        """Dictionaries with their keys, over which somebody may go."""
        self._spaces: list[tuple[Mapping[str, Any], frozenset[str], str]] = []
        """Attributes, where others may be added."""
        self._num_attributes = 0
        self._sets: list[tuple[set[Any], frozenset[Any], str]] = []
        self.absent: list[Place] = []
        """Modules with the names of variables that they do not have yet."""
        self.functions: list[types.CodeType] = []
        """Code of the program's functions whose names were followed."""
        self.moving: list[str] = []
        """Names of what gives another value each time it is asked."""

    def item(self, owner: Any, key: Any, name: str) -> Any:
        """Watch ``owner[key]`` and return it."""
        return self._take(self._items, owner, key, owner[key], name)

    def attribute(self, owner: Any, key: str, name: str) -> Any:
        """Watch an attribute that is in no ``__dict__`` and return it."""
        return self._take(self._attributes, owner, key, getattr(owner, key), name)

    def variables(self, names: Iterable[str]) -> None:
        """Watch environment variables."""
        for name in names:
            self.attribute(Variable(name), "value", f"the environment variable {name}")

    def files(self, paths: Iterable[str]) -> None:
        """Watch files that were read."""
        for path in sorted(paths):
            self.attribute(ReadFile(path), "value", f"the file {path}")

    def settings(self, names: Iterable[str]) -> None:
        """Watch settings of torch."""
        for name in sorted(names):
            self.attribute(AskedSetting(name), "value", name)

    @staticmethod
    def _take(columns: Columns, owner: Any, key: Any, value: Any, name: str) -> Any:
        for column, part in zip(columns, (owner, key, value, name), strict=True):
            column.append(part)
        return value

    def size(self, owner: Any, name: str) -> None:
        """Watch the length of a container."""
        self._length += len(owner)
        owners, lengths, names = self._sizes
        owners.append(owner)
        lengths.append(len(owner))
        names.append(name)
        if isinstance(owner, (dict, types.MappingProxyType)) and 1 < len(owner) <= _MANY_KEYS:
            ordered, keys, ordered_names = self._orders
            ordered.append(owner)
            keys.append(list(owner))
            ordered_names.append(name)

    def kind(self, owner: Any, name: str) -> None:
        """Watch which class an object has."""
        owners, kinds, names = self._kinds
        owners.append(owner)
        kinds.append(type(owner))
        names.append(name)

    def space(self, owner: Mapping[str, Any], name: str) -> None:
        """Watch which attributes an object has."""
        self._num_attributes += len(owner)
        self._spaces.append((owner, frozenset(owner), name))

    def set_on(self, tensor: torch.Tensor, name: str) -> None:
        """Watch which attributes a program has set on a tensor, whatever an open step sets there."""
        self.attribute(SetOnTensor(tensor), "value", f"{name}['value']")

    def content(self, value: Any, name: str) -> None:
        """Watch what a tensor, an array or a set holds."""
        if isinstance(value, set):
            self._sets.append((value, elements_of(value), name))
        elif isinstance(value, ARRAYS):
            raw = raw_of(value)
            if len(raw) <= _MAX_ARRAY_BYTES:
                self._arrays.append((value, raw, name))
            else:
                self._large.append((value, digest_of(raw), name))
        elif isinstance(value, torch.Tensor) and self._versions:
            # Not all that writes to a tensor counts as a version, and some have none.
            if is_plain(value) and value.nbytes <= _MAX_ARRAY_BYTES:
                self._contents.append((value, bytes_of(value).clone(), name))
            if not value.is_inference():
                tensors, numbers, names = self._tensors
                tensors.append(value)
                numbers.append(value._version)
                names.append(name)

    def changed(self) -> str | None:
        """Return the first value that differs, with its name, what it was and what it is now."""
        owners, keys, values, _ = self._items
        objects, names, known, _ = self._attributes
        sized, lengths = self._sizes[0], self._length
        try:
            if (
                all(map(operator.is_, map(operator.getitem, owners, keys), values))
                and all(map(operator.is_, map(getattr, objects, names), known))
                and all(map(operator.is_, map(type, self._kinds[0]), self._kinds[1]))
                and sum(map(len, sized)) == lengths
                and sum(map(len, map(_space, self._spaces))) == self._num_attributes
                and all(map(operator.eq, map(_version, self._tensors[0]), self._tensors[1]))
                and all(raw_of(held) == content for held, content, _ in self._arrays)
                and all(elements_of(held) == elements for held, elements, _ in self._sets)
                and not any(key in space for space, key, _ in self.absent)
                and list(map(list, self._orders[0])) == self._orders[1]
                and all(torch.equal(bytes_of(held), content) for held, content, _ in self._contents)
                and all(digest_of(raw_of(held)) == known for held, known, _ in self._large)
            ):
                return None
        except (LookupError, AttributeError, ValueError):
            pass  # something is not there any more
        changes = self.changes()
        if self._reads is not None:
            changes += self._given(self._reads, [row for row in self.absent if row[1] in row[0]])
        changes += self._unlike()
        if not changes:
            self._num_attributes = sum(map(len, map(_space, self._spaces)))
        return changes[0].text if changes else None

    def changes(self, reads: Reads | None = None) -> list[WatchedChange]:
        """Return all values that differ; equal ones are taken over under their new identity."""
        changes = []
        for get, columns in ((_item, self._items), (attribute_of, self._attributes)):
            for i, (owner, key, value, name) in enumerate(zip(*columns, strict=True)):
                now = get(owner, key)
                if now is value or (reads is not None and not reads.reach(name, key)):
                    continue
                if same(value, now):
                    columns[2][i] = now
                elif reads is None or not alike(value, now):
                    text = f"{name} was {shown(value)} and is {shown(now)} now"
                    changes.append(WatchedChange(name, key, text))
        for owner, length, name in zip(*self._sizes, strict=True):
            leaf = _leaf(name)
            if len(owner) != length and (reads is None or reads.reach(name, leaf)):
                text = f"{name} had {length} entries and has {len(owner)} now"
                changes.append(WatchedChange(name, leaf, text))
        for tensor, version, name in zip(*self._tensors, strict=True):
            if tensor._version != version:
                changes.append(WatchedChange(name, None, f"the tensor {name} was written to"))
        for held, elements, name in self._sets:
            if (
                elements_of(held) != elements
                and len(held) == len(elements)
                and (reads is None or reads.reach(name, _leaf(name)))
            ):
                changes.append(
                    WatchedChange(name, _leaf(name), f"the set {name} has other elements now")
                )
        written = [n for held, content, n in self._arrays if raw_of(held) != content]
        written += [n for held, known, n in self._large if digest_of(raw_of(held)) != known]
        written += [
            n for held, known, n in self._contents if not torch.equal(bytes_of(held), known)
        ]
        if reads is not None:
            added = [row for row in self.absent if row[1] in row[0]]
            changes += self._given(reads, added)
        return changes + [WatchedChange(n, None, f"the array {n} was written to") for n in written]

    def _unlike(self) -> list[WatchedChange]:
        """Return what has another class now, or its entries in another order."""
        return [
            WatchedChange(name, "__class__", f"{name} is of {type(owner).__qualname__} now")
            for owner, kind, name in zip(*self._kinds, strict=True)
            if type(owner) is not kind
        ] + [
            WatchedChange(name, _leaf(name), f"{name} has its entries in another order now")
            for owner, keys, name in zip(*self._orders, strict=True)
            if list(owner) != keys
        ]

    def _given(self, reads: Reads, others: Sequence[Place] = ()) -> list[WatchedChange]:
        """Return what objects got that count, and what of ``others`` does."""
        added: list[tuple[Mapping[str, Any], str, str]] = [*others]
        for space, keys, name in self._spaces:
            added += [(space, key, f"{name}.{key}") for key in space.keys() - keys]
        return [
            WatchedChange(name, key, f"{name} was not there and is {shown(space[key])} now")
            for space, key, name in added
            if reads.reach(name, key)
        ]

    def places(self) -> list[tuple[Any, Any, Any, str]]:
        """Return owners, keys, values and names, as they were."""
        items = zip(*self._items, strict=True)
        plain = [(o.of if isinstance(o, StoredItems) else o, k, v, n) for o, k, v, n in items]
        return plain + list(zip(*self._attributes, strict=True))

    def sized(self) -> list[tuple[Any, int, str]]:
        """Return the containers whose length is watched, their lengths and names."""
        return list(zip(*self._sizes, strict=True))

    def without(self, names: frozenset[str]) -> Watches:
        """Return the watches of all but these, and but what is in these."""
        if not names:
            return self
        rest = Watches(versions=self._versions, reads=self._reads)
        gone = {id(owner) for owner, _, name in self.sized() if name in names}
        for columns, kept in ((self._items, rest._items), (self._attributes, rest._attributes)):
            for row in zip(*columns, strict=True):
                if row[3] not in names and id(row[0]) not in gone:
                    self._take(kept, *row)
        owners, lengths, kept_names = rest._sizes
        for owner, length, name in self.sized():
            if name not in names:
                rest._length += length
                owners.append(owner)
                lengths.append(length)
                kept_names.append(name)
        rest._sets = [row for row in self._sets if row[2] not in names]
        rest._tensors, rest._arrays, rest.moving = self._tensors, self._arrays, self.moving
        rest._contents, rest._orders, rest._kinds = self._contents, self._orders, self._kinds
        rest._large, rest._spaces, rest.absent = self._large, self._spaces, self.absent
        rest._num_attributes = self._num_attributes
        return rest


def _space(row: tuple[Mapping[str, Any], frozenset[str], str]) -> Mapping[str, Any]:
    return row[0]


def _leaf(name: str) -> object:
    """Return the attribute that a place lies in; ``None`` where its name does not say."""
    leaf = _ENTRY.sub("", name).rpartition(".")[2]
    return leaf if leaf.isidentifier() else None


def _version(tensor: torch.Tensor) -> int:
    return tensor._version


def _item(owner: Any, key: Any) -> Any:
    try:
        return owner[key]
    except LookupError:
        return GONE


def attribute_of(owner: Any, key: str) -> Any:
    """Return an attribute, or ``GONE``."""
    try:
        return getattr(owner, key, GONE)
    except ValueError:  # an empty cell
        return GONE
