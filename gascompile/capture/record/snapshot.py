"""Snapshot: what containers and cells held before a capture, to be put back after it."""

from __future__ import annotations

import random
import types
from collections import deque
from typing import Any

import numpy

from gascompile.capture.record.op_names import op_spaces
from gascompile.capture.record.stand_ins import Current
from gascompile.capture.record.watched import Watches


class Snapshot:
    """Of what ``Watches`` has seen, taken at once."""

    def __init__(self, watches: Watches) -> None:
        """Take shallow copies."""
        rows = [row[:3] for row in watches.places()]
        self._places = [(holder_of(*row), *row[1:]) for row in rows]
        owners = {id(owner): owner for owner, _, _ in rows}
        owners.update((id(owner), owner) for owner, *_ in watches.sized())
        # Others write to a module's globals, too; what is watched there is in the places.
        ops = op_spaces()
        self._dicts = [
            (owner, set(owner))
            for owner in owners.values()
            if isinstance(owner, dict) and "__builtins__" not in owner and id(owner) not in ops
        ]
        self._absent = [(owner, key) for owner, key, _ in watches.absent if id(owner) not in ops]
        # What an instance has of its class is its own as soon as it is assigned.
        own = ((own_space(owner), key) for owner, key, _ in rows)
        self._absent += [
            (space, key) for space, key in own if space is not None and key not in space
        ]
        self._lists = [(o, list(o)) for o in owners.values() if isinstance(o, (list, deque))]

    def restore(self) -> None:
        """Let everything hold what it held."""
        for owner, key in self._absent:
            owner.pop(key, None)
        for owner, keys in self._dicts:
            if owner.keys() != keys:
                for key in [key for key in owner if key not in keys]:
                    del owner[key]
        for values, before in self._lists:
            same = len(values) == len(before)
            if not same or any(a is not b for a, b in zip(values, before, strict=True)):
                values.clear()
                values.extend(before)
        for owner, key, value in self._places:
            if get(owner, key) is not value:
                put(owner, key, value)


class Draws:
    """The random numbers to come, of those that all draw from."""

    def __init__(self) -> None:
        """Take note of the states."""
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()  # noqa: NPY002 - what all draw from

    def restore(self) -> None:
        """Let the same be drawn again."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)  # noqa: NPY002 - what all draw from


def holder_of(owner: Any, key: Any, value: object) -> Any:
    """Return whose ``value`` it is that an owner has as ``key``: an instance's own space, its class, or the owner."""
    if not isinstance(key, str):
        return owner
    space = own_space(owner)
    if space is not None and space.get(key, own_space) is value:
        return space
    kind = owner if isinstance(owner, type) else type(owner)
    base = next((base for base in kind.__mro__ if key in vars(base)), None)
    return base if base is not None and vars(base)[key] is value else owner


def own_space(owner: object) -> dict[str, Any] | None:
    """Return the attributes that an instance does not have from its class; ``None`` for what is no instance of one."""
    if isinstance(owner, (type, dict, list, tuple, deque, types.CellType, Current)):
        return None
    try:
        space = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return space if isinstance(space, dict) else None


def undo(watches: Watches, names: frozenset[str]) -> None:
    """Let these values be as they were when they were watched; lists have only grown since."""
    rows = watches.places()
    own = {(id(owner), key) for owner, key, *_ in rows}
    for owner, key, value, name in rows:
        space = own_space(owner)
        if name not in names:
            continue
        if space is not None and key in space and (id(space), key) not in own:
            del space[key]  # it was the class's
        else:
            put(owner, key, value)
    for owner, length, name in watches.sized():
        if name in names and isinstance(owner, list):
            del owner[length:]


def put(owner: Any, key: Any, value: object) -> bool:
    """Put a value where ``Watches`` found one; False where nothing can be put."""
    if isinstance(owner, (dict, list, deque)):
        owner[key] = value
    elif isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, Current):
        owner.value = value
    elif isinstance(key, str) and not isinstance(owner, (tuple, types.MappingProxyType)):
        kind = owner if isinstance(owner, type) else type(owner)
        base = next((base for base in kind.__mro__ if key in vars(base)), None)
        space = own_space(owner)
        if (
            space is not None
            and key in space
            and not hasattr(vars(base or kind).get(key), "__set__")
        ):
            space[key] = value
            return True
        if base is None:
            return False
        slot = vars(base)[key]
        if not isinstance(slot, types.MemberDescriptorType):
            setattr(base, key, value)
            return True
        try:
            slot.__set__(owner, value)  # of frozen classes as well
        except AttributeError:  # a field of C that no code sets, such as the flags of a pattern
            return False
    else:
        return False
    return True


def get(owner: Any, key: Any) -> Any:
    """Return what is there now, or ``None``."""
    try:
        if isinstance(owner, dict):
            return dict.get(owner, key)
        if isinstance(owner, (list, tuple, deque, types.MappingProxyType)):
            return owner[key]
        return getattr(owner, key)
    except (LookupError, AttributeError, ValueError):
        return None
