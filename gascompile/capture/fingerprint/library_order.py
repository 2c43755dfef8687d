"""Library order: what libraries keep in an order that is another one in each process, in one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_SETS = frozenset({"_use_default_values", "_signature_columns", "signature_columns"})
"""Lists made of sets: the defaults of diffusers' configurations, what transformers' Trainer keeps of a data set."""


def in_one_order(key: object, value: object) -> object:
    """Return an entry or an attribute, in an order that is the same in each process."""
    if isinstance(key, str) and key in _OF_SETS and isinstance(value, list):
        return sorted(value, key=repr)
    return value


def hooks_of_others(registered: Mapping[Any, Any]) -> list[Any]:
    """Return hooks, whose keys count all of the process, but for ours: an open step has some on its model."""
    hooks = registered.values()
    return [
        hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("gascompile.")
    ]
