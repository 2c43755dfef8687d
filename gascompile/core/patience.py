"""Patience: how long a wait for the drives of this process may bring nothing at all before they count as dead.

A process that is alone waits as long as its user does. Ranks of a job wait for each other, and who waits for a dead
drive holds up all of them: they have a limit. What a dead drive may still write to is never given back: whoever gives
up waits again before memory changes hands, and gives up again, until the drive answers.
"""

from __future__ import annotations

import math
import time
from weakref import WeakKeyDictionary

from gascompile.core.errors import StorageError

_AGAIN_S = 0.1
"""After a wait was given up, others are as soon as this, as long as nothing arrives."""
_LOOK_S = 1.0
"""Looks are a fifth of this apart: where more has passed between two, this process was stopped, not a drive."""
_limits: WeakKeyDictionary[object, float] = WeakKeyDictionary()
_arrivals = [0, -1]
"""How much has arrived so far, and how much had when a wait was last given up."""


def limit(owner: object, limit_s: float) -> None:
    """Let no wait bring nothing for longer than ``limit_s``, while ``owner`` lives; the longest of several counts."""
    _limits[owner] = limit_s


def lift(owner: object) -> None:
    """Let waits last as long as the limits of others say."""
    _limits.pop(owner, None)


def arrived() -> None:
    """Note that a drive has read or written something."""
    _arrivals[0] += 1


class Watch:
    """Over one wait for a drive; to be called now and then while it lasts."""

    __slots__ = ("_last_s", "_seen", "_waited_s", "_what")

    def __init__(self, what: str) -> None:
        """Begin; ``what`` is waited for, for the message."""
        self._what, self._seen = what, _arrivals[0]
        self._waited_s, self._last_s = 0.0, time.monotonic()

    def __call__(self) -> None:
        """Return while the wait is worth it.

        Raises:
            StorageError: no drive of this process has read or written anything for too long.
        """
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._last_s, _LOOK_S)
        self._last_s = now_s
        if _arrivals[0] != self._seen:
            self._seen, self._waited_s = _arrivals[0], 0.0
            return
        is_known = _arrivals[1] == self._seen
        limit_s = _AGAIN_S if is_known else max(_limits.values(), default=math.inf)
        if self._waited_s > limit_s:
            _arrivals[1] = self._seen
            raise StorageError(
                f"nothing was read or written{' any more' if is_known else f' for {limit_s:.0f} s'}, which "
                f"{self._what} waits for: a drive hangs or is gone. Check the drives of the cache folder and of the "
                "weights, and start the job again"
            )
