"""Tensor slots: which parameters and buffers a model has while it is traced, whose tensors stand in for the real ones.

A buffer that gets another tensor is a state, which the graph carries; whatever else changes is a value of Python's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gascompile.capture.record.watched import WatchedChange

Slots = Mapping[tuple[str, str], tuple[bool, torch.Tensor | None]]
"""Module and name -> whether it is a parameter, and what it is."""


def tensor_slots(model: nn.Module) -> Slots:
    """Return the parameters and buffers as they are now."""
    return {
        (path or type(model).__name__, key): (is_parameter, tensor)
        for path, module in model.named_modules()
        for is_parameter, held in ((True, module._parameters), (False, module._buffers))
        for key, tensor in held.items()
    }


def changed_slots(before: Slots, now: Slots) -> list[WatchedChange]:
    """Return those that are there no more, are new, or are set for the first time; and parameters that are others."""
    changes = []
    for slot in dict.fromkeys((*before, *now)):
        was_parameter, was = before.get(slot, (False, None))
        is_parameter, tensor = now.get(slot, (False, None))
        is_state = was is not None and tensor is not None and not was_parameter
        if was is tensor or (is_state and not is_parameter):
            continue
        name = ".".join(slot)
        text = f"the tensor {name} is another one now"
        changes.append(WatchedChange(name, slot[1], text))
    return changes
