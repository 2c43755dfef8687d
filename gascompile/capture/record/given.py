"""Given containers: lists and dicts among a call's arguments, to which a model may add, and a plan does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Container = list[Any] | dict[Any, Any]
Entries = list[tuple[Container, list[Any]]]


def entries_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entries:
    """Return the containers that a caller still has after the call, each with what is in it."""
    containers = _containers([*args, *kwargs.values()])
    return [(container, _entries(container)) for container in containers]


def changed_entries(before: Entries) -> bool:
    """Return whether a container has other entries than it had."""
    for container, entries in before:
        now = _entries(container)
        if len(now) != len(entries) or any(a is not b for a, b in zip(now, entries, strict=True)):
            return True
    return False


def _entries(container: Container) -> list[Any]:
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return [*container]


def _containers(values: list[Any]) -> Iterator[Container]:
    """Yield lists and dicts of Python's own: caches of libraries are taken apart, and followed."""
    for value in values:
        if type(value) is list or type(value) is dict:
            yield value
        if type(value) in (list, tuple):
            yield from _containers([*value])
        elif type(value) is dict:
            yield from _containers([*value.values()])
