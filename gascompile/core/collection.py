"""The garbage collector at rest: what is made all at once and kept needs no passes over everything in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
