"""Library order: what libraries keep in an order that is another one in each process, in one that is not."""

from __future__ import annotations


def in_one_order(key: object, value: object) -> object:
    """Return an entry or an attribute; diffusers configurations list their defaults in the order of a set."""
    if isinstance(key, str) and key == "_use_default_values" and isinstance(value, list):
        return sorted(value, key=repr)
    return value
