"""Size types: whether a model's code looks if a size is an int, which one of a range is not in a trace."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gascompile.capture.record.recorder import Running


@contextmanager
def types_of_sizes_noted(running: Running) -> Iterator[None]:
    """Note where ``isinstance`` gives another answer for a size of a range than it does for a number."""
    own = builtins.isinstance

    def told(value: object, kinds: Any, /) -> bool:
        found = own(value, kinds)
        if not found and type(value) is torch.SymInt and own(1, kinds):
            running.asks_type(sys._getframe(1))
        return found

    setattr(builtins, "isinstance", told)  # noqa: B010 - mypy forbids a plain assignment
    try:
        yield
    finally:
        setattr(builtins, "isinstance", own)  # noqa: B010
