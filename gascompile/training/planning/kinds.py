"""Kinds of batches: what a step is planned for, and what therefore makes another plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.torch_settings import settings_now
from gascompile.core import serial


def leaf_kinds(batch: Any) -> list[object]:
    """Return what plans know of the leaves of a batch: dtype, shape and strides of tensors, all else by value."""
    return [
        [str(x.dtype), list(x.shape), list(x.stride())] if isinstance(x, torch.Tensor) else repr(x)
        for x in pytree.tree_leaves(batch)
    ]


def kind_of(model: nn.Module, batch: Any, *, trains: bool, calls: bool = False) -> str:
    """Return a digest of all that decides which ops a step runs, as far as it can change between calls."""
    spec = pytree.tree_structure(batch)
    modes = tuple([module.training for module in model.modules()])
    # Of an open tensor it would be asked in Python.
    with torch._C.DisableTorchFunctionSubclass():
        frozen = tuple([not parameter.requires_grad for parameter in model.parameters()])
    does = "calls" if calls else trains
    return _digest_of(str(spec), _told(leaf_kinds(batch)), modes, frozen, settings_now(), does)


@lru_cache(maxsize=64)
def _digest_of(spec: str, leaves: Any, *others: Any) -> str:
    """Return a digest; steps ask for that of the same few kinds again and again."""
    return serial.digest([spec, leaves, *others])


def _told(kinds: list[object]) -> tuple[object, ...]:
    return tuple([_told(kind) if isinstance(kind, list) else kind for kind in kinds])
