"""The garbage collector at rest: what is made all at once and kept needs no passes over everything in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_has_frozen = False
"""Whether the program has frozen objects before; if it unfreezes them, collections take longer again."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running within; whether it runs is then as before.

    What was made within counts as old from then on. Counted as new it would bring a full collection on at once, of
    all that torch and other libraries have loaded as well: 160 ms after a plan with 1,400 ops was read.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # To freeze and to unfreeze puts all objects among the oldest. What a program has frozen itself stays so.
            if not _program_froze():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _program_froze() -> bool:
    """Return whether the program has frozen objects; asked until it has, as they are counted one by one."""
    global _has_frozen  # noqa: PLW0603 - of the process, as the collector is
    _has_frozen = _has_frozen or gc.get_freeze_count() > 0
    return _has_frozen
