"""Function tables: what a library chooses functions from by a name, where a program may put one of its own."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gascompile.capture.fingerprint.code_names import Names, names_of
from gascompile.capture.fingerprint.code_origin import Origin, origin_of_name
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


def names_and_tables(
    code: Iterable[tuple[types.CodeType, dict[str, Any]]],
) -> Iterator[tuple[Names, dict[str, Any]]]:
    """Yield what each code can reach by name, and the tables of its module, with its globals.

    A decorator may have been given such a table, in which then no code of the module's looks by name.
    """
    seen: set[int] = set()
    for body, space in code:
        yield names_of(body), space
        if id(space) not in seen:
            seen.add(id(space))
            chains = frozenset((name,) for name in tables_in(space))
            yield Names(chains, frozenset(), frozenset(), by_name=False), space


def tables_in(space: Mapping[str, Any]) -> list[str]:
    """Return the names of a library's own tables of functions in a module; plain dicts are mostly registers."""
    if origin_of_name(str(space.get("__name__"))) is not Origin.INSTALLED:
        return []
    found = [*space.items()]
    # By the type alone: some objects import whatever they are asked for.
    return [
        name
        for name, held in found
        if issubclass(type(held), Mapping) and type(held) is not dict and table_of(held)[1]
    ]


def words_of(key: object) -> str:
    """Return what a key says of itself in every process: some say where they lie in the memory of this one."""
    return _ADDRESS.sub("", repr(key))
