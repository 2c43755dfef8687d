"""Waiting for what other threads do, for as long as the busiest machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable

_LIMIT_S = 60.0


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether a condition has come to hold."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True
