"""Likeness: whether a value of Python's is still what it was, by value where identity does not say so."""

from __future__ import annotations

import enum
import types
from collections import deque
from typing import Any

import torch

from gascompile.capture.fingerprint.code_origin import origin_of_name

SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
GONE = object()
"""In the place of what is not there any more."""


def is_scalar(value: object) -> bool:
    """Return whether what is printed of a value says all; members of the program's enumerations may have more."""
    if isinstance(value, enum.Enum):
        return origin_of_name(type(value).__module__).versioned
    return isinstance(value, SCALARS)


def same(before: Any, now: Any) -> bool:
    """Return whether two scalars are one value, which 1, 1.0 and True are not, nor 0.0 and -0.0."""
    if type(before) is not type(now):
        return False
    if isinstance(before, types.MethodType):
        return before.__func__ is now.__func__ and before.__self__ is now.__self__
    if isinstance(before, tuple):
        same_size = len(before) == len(now)
        return same_size and all(a is b or same(a, b) for a, b in zip(before, now, strict=True))
    return isinstance(before, SCALARS) and repr(before) == repr(now)


def alike(before: Any, now: Any) -> bool:
    """Return whether two containers hold the same, as those that torch.export puts in a module's attributes."""
    if type(before) is not type(now):
        return False
    if isinstance(before, dict):
        return list(before) == list(now) and alike(list(before.values()), list(now.values()))
    if isinstance(before, (list, tuple, deque)):
        pairs = zip(before, now, strict=False)
        return len(before) == len(now) and all(a is b or alike(a, b) for a, b in pairs)
    return same(before, now)


def shown(value: Any) -> str:
    """Return a value in words, short."""
    if value is GONE:
        return "not there"
    if isinstance(value, SCALARS):
        return f"{value!r:.60}"
    return f"another {type(value).__name__}"
