"""Shapes: emptied parameters while a trace looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from gascompile.core.deferral import deferred
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.train_state import States

Result = TypeVar("Result")


def with_shapes(states: States | None, storages: Storages, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns, during which emptied parameters have their shapes, without memory."""

    def seen() -> Result:
        with storages.apart():
            return work()

    def lifted() -> Result:
        if states is None:
            return seen()
        states.covers.lift()
        try:
            for name, tensor in states.tensors.items():
                tensor.data = states.outline(name)
            return seen()
        finally:
            for tensor in states.tensors.values():
                tensor.data = torch.empty(0, dtype=tensor.dtype)
            states.covers.put()

    return deferred(lifted)
