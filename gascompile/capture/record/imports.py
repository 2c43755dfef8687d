"""Imports: modules that captures import themselves, which another process lacks when it looks for its plan."""

from __future__ import annotations

import sys
import threading


class _Imports:
    """Of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[str] | None = None
        self._by_captures: frozenset[str] = frozenset()

    def before(self) -> None:
        """Take note of what is imported, before anything is for a capture: when its plan is looked for."""
        with self._lock:
            self._before = set(sys.modules)

    def after(self, first: set[str]) -> None:
        """Take note of what a capture has imported: ``first`` while it ran, and what it is made with before that."""
        with self._lock:
            made_with = set() if self._before is None else sys.modules.keys() - self._before
            self._before = None
            self._by_captures |= first | made_with

    def by_captures(self) -> frozenset[str]:
        """Return what captures have imported."""
        return self._by_captures


imports = _Imports()
