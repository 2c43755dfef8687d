"""Function tables: what a library chooses functions from by a name, where a program may put one of its own."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gascompile.capture.fingerprint.code_origin import origin_of_name
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


def table_entries(value: Mapping[Any, Any], identity: Callable[[object], str]) -> dict[str, str]:
    """Return what tells the functions that are chosen from ``value`` from others, under words for their keys.

    Behind each stands the module of a library that it comes from, as far as it comes from one.
    """
    table, keys = table_of(value)
    told: Counter[str] = Counter()
    entries = {}
    for key in keys:
        words = _ADDRESS.sub("", repr(key))
        told[words] += 1
        held = table[key]
        module = getattr(held, "__module__", None)
        known = isinstance(module, str) and origin_of_name(module).versioned
        entries[f"{words} {told[words]}"] = f"{identity(held)} {module if known else ''}"
    return entries


def is_as_it_was(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether a table holds what it held, but for what modules put there that are not imported yet.

    A register fills up as a library is imported: what such a module puts there will come as it came.
    """
    if any(before.get(words) != entry for words, entry in now.items()):
        return False
    away = [entry.partition(" ")[2] for words, entry in before.items() if words not in now]
    return all(module and module not in sys.modules for module in away)
