"""Library order: what libraries keep in an order that is another one in each process, in one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_one_order(key: object, value: object) -> object:
    """Return an entry or an attribute; diffusers configurations list their defaults in the order of a set."""
    if isinstance(key, str) and key == "_use_default_values" and isinstance(value, list):
        return sorted(value, key=repr)
    return value


def hooks_of_others(registered: Mapping[Any, Any]) -> list[Any]:
    """Return hooks, whose keys count all of the process, but for ours: an open step has some on its model."""
    hooks = registered.values()
    return [
        hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("gascompile.")
    ]
