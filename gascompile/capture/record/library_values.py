"""Library values: the numbers, words and flags that a library's code reads, where a program may set others.

A library's own functions set them, as ``attention_backend`` of diffusers does, or anybody who knows their names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_name
from gascompile.capture.record.likeness import SCALARS
from gascompile.capture.record.watched import stored_items

_MANY_ENTRIES = 256
"""A larger table is a register of all that a library has, and no choice that is made in a call."""
_FIXED = (tuple, frozenset)
_TABLES = (dict, types.SimpleNamespace)
"""What settings are kept in that have a name of their own, or one of a class or of another table."""

Place = tuple[Any, Any, str]
"""What to ask, for what, and what to call the answer."""


def is_plain_value(value: object) -> bool:
    """Return whether a value is a scalar, or made of scalars for good."""
    if isinstance(value, tuple | frozenset) and type(value) in _FIXED:
        return all(is_plain_value(inner) for inner in value)
    return isinstance(value, SCALARS)


def plain_places(
    value: object, name: str, reads: Callable[[str], bool], *, is_inner: bool = False
) -> Iterator[Place]:
    """Yield where in a library's value plain values stand that are read.

    Args:
        value: what stands under a name that a library's code reads.
        name: what to call it.
        reads: whether an attribute of this name is read.
        is_inner: whether it stands in another value, of which tables alone are looked into.
    """
    if isinstance(value, types.ModuleType) or type(value) in _FIXED:
        return
    if isinstance(value, Mapping):
        if isinstance(value, dict) and len(value) <= _MANY_ENTRIES:
            for key, held in value.items():
                if not is_plain_value(key):
                    continue
                if is_plain_value(held):
                    yield stored_items(value), key, f"{name}[{key!r:.40}]"
                elif isinstance(held, _TABLES) and not is_inner:
                    yield from plain_places(held, f"{name}[{key!r:.40}]", reads, is_inner=True)
        return
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    spaces: list[Mapping[str, Any]] = [vars(kind) for kind in kinds if _is_installed(kind)]
    is_known = _is_installed(type(value)) or isinstance(value, types.SimpleNamespace)
    if not isinstance(value, type) and is_known and hasattr(value, "__dict__"):
        spaces.append(vars(value))
    for space in spaces:
        for key, held in [*space.items()]:
            if _is_special(key) or not reads(key):
                continue
            if is_plain_value(held):
                yield space, key, f"{name}.{key}"
            elif isinstance(held, _TABLES) and not is_inner:
                yield from plain_places(held, f"{name}.{key}", reads, is_inner=True)


def _is_installed(kind: type) -> bool:
    return origin_of_name(kind.__module__) is Origin.INSTALLED


def _is_special(key: object) -> bool:
    return not isinstance(key, str) or (key.startswith("__") and key.endswith("__"))
