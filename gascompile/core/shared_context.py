"""Shared context: what changes the whole process for as long as anybody is in it, in all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class SharedContext:
    """Entered when the first comes in and left when the last has gone: each alone would undo another's."""

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._enter = enter
        self._lock = threading.Lock()
        self._count = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Enclose work that needs it."""
        with self._lock:
            if self._count == 0:
                self._undo.enter_context(self._enter())
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._undo.close()
