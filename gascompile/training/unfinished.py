"""A step that has begun and not ended: whoever comes next tidies up after it, or learns that values are half new.

An interrupt may come between any two lines, those that take note of a failure included. So the note is there
before anything changes, and goes as the last thing that a step does.
"""

from __future__ import annotations

from collections.abc import Iterable

from gascompile.runtime.memory.persistent import Persistent
from gascompile.training.unit import StepUnit

_CHANGED = -1  # in place of a number: a step that has begun changed values


class Unfinished:
    """The step under way, by how often values had changed when it began."""

    def __init__(self, units: Iterable[StepUnit]) -> None:
        """Know whose transfers there may be; ``units`` grows."""
        self._units = units
        self._begun: int | None = None

    def begin(self, persistent: Persistent) -> None:
        """Take note of a step, or of an evaluation; files of values that it reads are those that they were.

        Raises:
            StorageError: one was changed, replaced or removed.
        """
        persistent.require_sources()
        self._begun = persistent.num_changes

    def changes(self) -> None:
        """Take note that values change from here on."""
        self._begun = _CHANGED

    def end(self) -> None:
        """Take note that all of it is done, its counts included."""
        self._begun = None

    def tidied(self, persistent: Persistent) -> bool:
        """Let what a broken step has moved be as before it; False where it has changed values.

        Raises:
            StorageError: a value cannot be read again.
        """
        if self._begun is None:
            return True
        if self._begun != persistent.num_changes:
            return False
        for unit in self._units:
            unit.executor.settle()
        persistent.recover()
        self._begun = None
        return True
