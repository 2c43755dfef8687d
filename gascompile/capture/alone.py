"""Alone: one capture of the process at a time, and no look at a model's classes meanwhile.

torch's tracers put functions of their own into torch's classes while they trace, for all threads. Two traces at once
take each other's for torch's own, and may leave them there for good.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import ParamSpec, TypeVar

from gascompile.core.waiting import Turn, is_own_thread

Given = ParamSpec("Given")
Result = TypeVar("Result")

_turn = Turn()


def alone(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Have a function wait until no other thread is in one that is to be alone; it may call others of them itself."""

    def taken(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        # Threads of ours work for who has the turn.
        if is_own_thread():
            return function(*args, **kwargs)
        return _turn.take(partial(function, *args, **kwargs))

    update_wrapper(taken, function)
    return taken
