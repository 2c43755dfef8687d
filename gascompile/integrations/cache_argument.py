"""The name under which a language model of transformers takes its cache, and gives it back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Since transformers 5.24, and before."""


def cache_argument(call: Callable[..., Any]) -> str:
    """Return the name of a cache among the arguments of a ``forward``, or of what else takes one."""
    parameters = inspect.signature(call).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[-1])


def argument_in(names: Iterable[str]) -> str:
    """Return the name of the cache among those of a call that has one."""
    known = set(names)
    return next(name for name in CACHE_ARGUMENTS if name in known)
