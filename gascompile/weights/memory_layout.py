"""How weights and states lie in memory: as in the model they come from, in files of ours, too.

A file holds what lies between the first and the last element of a tensor, so that what is read from it needs no
other order.
"""

from __future__ import annotations

import torch

from gascompile.core.program import BoundSpec
from gascompile.core.signature import strides_of
from gascompile.core.strides import distinct, span_elements


def with_strides(value: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Return ``value``, or a copy of it that is laid out as the program expects it."""
    if strides_of(value) == bound.strides:
        return value
    made = torch.empty_strided(bound.shape, bound.strides, dtype=value.dtype)
    distinct(made).copy_(distinct(value, like=made))
    return made


def as_span(value: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Return what a file holds of ``value``: all from its first element to its last, zero where it has none."""
    value = value.detach()
    if bound.stride is None:
        return value
    count = span_elements(bound.shape, bound.stride)
    if count == value.numel() and torch._debug_has_internal_overlap(value) == 0:
        return value.as_strided((count,), (1,))
    flat = torch.zeros(count, dtype=value.dtype)
    there = flat.as_strided(bound.shape, bound.stride)
    distinct(there).copy_(distinct(value, like=there))
    return flat
