"""The rule for what crosses the end of an iteration, by which plans are verified, timed and run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def crossing(touches: Iterable[tuple[Key, bool]]) -> list[Key]:
    """Return what crosses the end of an iteration that others follow, by its first touch.

    That is what is started in the list only after it has been waited for: its start of the iteration before
    is meant, and of the first iteration one that stands before it.

    Args:
        touches: of an iteration in its order, each with whether it starts a transfer or is a wait for one.
    """
    early: dict[Key, bool] = {}
    started: set[Key] = set()
    for key, starts in touches:
        if starts:
            started.add(key)
        elif key not in started:
            early.setdefault(key, True)
    return [key for key in early if key in started]
