"""Kinds of batches: what a step is planned for, and what therefore makes another plan."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.batch_classes import class_facts, told
from gascompile.capture.batches import plain_structure
from gascompile.capture.torch_settings import settings_now
from gascompile.core import serial
from gascompile.core.signature import same_tensors


def leaf_kinds(batch: Any) -> list[object]:
    """Return what plans know of the leaves of a batch: dtype, shape and strides of tensors, all else by value."""
    return [
        [str(x.dtype), list(x.shape), list(x.stride())] if isinstance(x, torch.Tensor) else told(x)
        for x in pytree.tree_leaves(batch)
    ]


def kind_of(
    model: nn.Module,
    batch: Any,
    *,
    trains: bool,
    calls: bool = False,
    of: tuple[list[nn.Module], list[nn.Parameter]] | None = None,
) -> str:
    """Return a digest of all that decides which ops a step runs, as far as it can change between calls.

    Args:
        model: that is trained.
        batch: of the step.
        trains: whether it is updated.
        calls: whether it is called as it is.
        of: its modules and its parameters in their order, where they are known.
    """
    modules, parameters = of or (list(model.modules()), list(model.parameters()))
    # Of an open tensor it would be asked in Python.
    with torch._C.DisableTorchFunctionSubclass():
        frozen = tuple([not parameter.requires_grad for parameter in parameters])
    does = "calls" if calls else trains
    others = tuple([module.training for module in modules]), frozen, settings_now(), does
    leaves: list[Any] = []
    structure = plain_structure(batch, leaves)
    if structure is None:
        return _slow_digest(batch, others)
    key = structure, tuple([_kind_key(leaf) for leaf in leaves]), same_tensors(leaves), others
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KINDS:
            _KNOWN.clear()
        _KNOWN[key] = _slow_digest(batch, others)
    return _KNOWN[key]


_MOST_KINDS = 64
"""Whose digests are kept: steps ask for that of the same few kinds again and again."""
_KNOWN: dict[Hashable, str] = {}


def _kind_key(leaf: Any) -> Hashable:
    return (leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _slow_digest(batch: Any, others: tuple[Any, ...]) -> str:
    leaves, structure = pytree.tree_flatten(batch)
    classes = class_facts(structure, leaves)
    # Of one tensor that is given twice, the loss gets one.
    same = same_tensors(leaves)
    return _digest_of(str(structure), _told(leaf_kinds(batch)), classes, same, *others)


@lru_cache(maxsize=_MOST_KINDS)
def _digest_of(spec: str, leaves: Any, *others: Any) -> str:
    """Return a digest; steps ask for that of the same few kinds again and again."""
    return serial.digest([spec, leaves, *others])


def _told(kinds: list[object]) -> tuple[object, ...]:
    return tuple([_told(kind) if isinstance(kind, list) else kind for kind in kinds])
