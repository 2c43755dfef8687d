"""Traced experts: mixtures of experts are traced by the products of transformers that have a formula for their shapes.

Torch describes its own grouped product in bfloat16 alone, so transformers takes another op, of the same bits, where a
compiler follows. A trace of a training step is no compiler's, but has the same need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MODULE = "transformers.integrations.moe"
_ASKS = "is_torchdynamo_compiling"
"""By which it chooses."""


@contextmanager
def describable() -> Iterator[None]:
    """Let transformers choose as where a compiler follows."""
    experts = sys.modules.get(_MODULE)
    if experts is None or not hasattr(experts, _ASKS):
        yield
        return
    before = getattr(experts, _ASKS)
    setattr(experts, _ASKS, _follows)
    try:
        yield
    finally:
        setattr(experts, _ASKS, before)


def _follows() -> bool:
    return True
