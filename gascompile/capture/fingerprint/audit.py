"""Audit: what Python tells of files that are opened and of functions that get other code, by one hook for all.

A hook stays for as long as the process lives. Python calls it for every look at a function's or a frame's code, too,
which takes ten times as long with it: who looks at thousands of them does so only where something was heard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

Opened = Callable[[tuple[Any, ...]], None]
"""Gets a path, a mode and flags, two frames below the call that opens."""


class Heard:
    """What the hook was told."""

    def __init__(self) -> None:
        self.num_rewritten = 0
        """How often a function was given other code where it lies."""
        self.opened: Opened | None = None
        """Told of each file that is opened."""


heard = Heard()


@cache
def listen() -> bool:
    """Begin to listen; return whether anything is heard, as other hooks of the process may refuse this one."""

    def told(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if heard.opened is not None:
                heard.opened(arguments)
        elif event == "object.__setattr__" and arguments[1] == "__code__":
            heard.num_rewritten += 1

    def nothing() -> None:
        """Gets its own code."""

    sys.addaudithook(told)
    nothing.__code__ = nothing.__code__
    return heard.num_rewritten > 0
