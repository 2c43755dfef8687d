"""Says so when what is measured, and then remembered, was measured on a busy machine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gascompile.cost_models.measure.host import OtherWork

_log = logging.getLogger("gascompile")

_BUSY_PROCESSORS = 0.3
"""So much work of others makes two waiting threads unreliable."""
_LEAST_S = 0.2
"""Of a measurement: the system counts work in steps of ten milliseconds, and says nothing about shorter ones."""


@contextmanager
def warned_if_busy(measured: str) -> Iterator[None]:
    """Warn, at the end, where other processes kept processors busy: everything seemed slower than it is.

    Args:
        measured: what was, for the message.
    """
    others = OtherWork()
    others.begin()
    start_s = time.perf_counter()
    yield
    if time.perf_counter() - start_s < _LEAST_S:
        return
    if (count := others.num_processors()) > _BUSY_PROCESSORS:
        _log.warning(
            "other processes kept %.1f of %d processors busy while %s was measured, which is remembered: times are "
            "predicted too high; run `gascompile calibrate` when the machine is idle",
            count,
            os.cpu_count(),
            measured,
        )
