"""Deferral: signals wait while something runs that an exception at any moment would leave half done.

Torch's traces change the interpreter's state, such as stacks of modes, and put it back in Python, where a handler
that raises leaves it changed for good: ops of other models fail then, or the process ends. So handlers wait for the
end. Python's own of Ctrl-C is called before, at a ``safe_point``, which traces come by at every op: others might
compute, or raise what a trace takes for the model's.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")

_PATIENCE_S = 10.0
"""After which another signal is handled at once: a model's own endless loop comes by no safe point."""


class _Deferral:
    """Stands in for the handlers of all signals that have one in Python."""

    def __init__(self) -> None:
        self.is_over = False
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._noted: list[int] = []
        self._first_s = 0.0

    def __call__(self, number: int, frame: Any) -> None:
        """Take note of a signal."""
        now_s = time.monotonic()
        if not self._noted:
            self._first_s = now_s
        if self.is_over or (self._noted and now_s - self._first_s > _PATIENCE_S):
            self._handlers[number](number, frame)
        else:
            self._noted.append(number)

    def begin(self) -> None:
        """Take the handlers' place."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            while isinstance(handler, _Deferral):
                # One whose end was broken off.
                handler = handler._handlers[number]
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self)

    def end(self) -> None:
        """Give their place back; one that raises in between leaves this in others', whom it calls."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)

    def interrupt(self) -> None:
        """Raise ``KeyboardInterrupt`` where that is what a signal has asked for."""
        for number in self._noted:
            if self._handlers[number] is signal.default_int_handler:
                self._noted.remove(number)
                signal.default_int_handler(number, sys._getframe())

    def deliver(self) -> None:
        """Call the handlers of all that was noted, whatever one of them raises."""
        if self._noted:
            number = self._noted.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self.deliver()


_current: list[_Deferral] = []


def deferred(work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns. Signals that come meanwhile are handled after it, Ctrl-C at its safe points."""
    if _current or threading.current_thread() is not threading.main_thread():
        # Handlers run on the main thread alone.
        return work()
    deferral = _Deferral()
    try:
        deferral.begin()
        _current.append(deferral)
        return work()
    finally:
        _current.clear()
        deferral.is_over = True
        deferral.end()
        deferral.deliver()


def deferring(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let signals wait while ``function`` runs, but for its safe points."""

    @functools.wraps(function)
    def whole(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return deferred(functools.partial(function, *args, **kwargs))

    return whole


def safe_point() -> None:
    """Raise the ``KeyboardInterrupt`` that has waited, here, where it does no harm."""
    if _current and threading.current_thread() is threading.main_thread():
        _current[0].interrupt()
