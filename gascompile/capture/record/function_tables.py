"""Function tables: what a library chooses functions from by a name, where a program may put one of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from gascompile.capture.record.stand_ins import stored_items

_MANY_FUNCTIONS = 256
"""A larger table is a register of all that a library has, and no choice that is made in a call."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""What an object without words of its own says of itself: another one in every process."""


def table_of(value: Mapping[Any, Any]) -> tuple[Any, list[Any]]:
    """Return what to ask for the functions that are chosen from ``value``, and their keys.

    That is a dictionary, or an object that chooses from dictionaries that it or its class has.
    """
    owner: Any = value
    if value is sys.modules:
        return owner, []  # It fills up with what is imported, which is recorded by itself.
    if isinstance(value, dict):
        owner, tables = stored_items(value), [value]
    else:
        spaces = [vars(of) for of in (value, *type(value).__mro__) if hasattr(of, "__dict__")]
        tables = [held for space in spaces for held in space.values() if type(held) is dict]
    keys = dict.fromkeys(
        key for table in tables for key, held in [*dict.items(table)] if callable(held)
    )
    if len(keys) > _MANY_FUNCTIONS:
        return owner, []
    return owner, [key for key in keys if _is_stored(owner, key, tables)]


def _is_stored(owner: Any, key: object, tables: list[dict[Any, Any]]) -> bool:
    """Return whether who asks for a function is given one of those that are there, and none made for him."""
    try:
        held = owner[key]
    except LookupError:
        return False
    return any(table.get(key) is held for table in tables)


def words_of(key: object) -> str:
    """Return what a key says of itself in every process: some say where they lie in the memory of this one."""
    return _ADDRESS.sub("", repr(key))
