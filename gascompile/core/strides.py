"""Strides: how the elements of a tensor lie in memory, by numbers alone.

Dimensions of size 1 have strides that no element depends on; the functions here agree on what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def normal_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``stride`` with those of dimensions of size 1 replaced by what the dimension inside them spans.

    A tensor that is contiguous has the strides of a new one, in whichever way it came to be.
    """
    dense = contiguous_strides(shape)
    if 0 in shape or all(a == b for n, a, b in zip(shape, stride, dense, strict=True) if n > 1):
        return dense
    normal = list(stride)
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            inner = dim + 1
            normal[dim] = normal[inner] * max(shape[inner], 1) if inner < len(shape) else 1
    return tuple(normal)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last one of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def distinct(value: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``value`` without the elements that an expansion, of it or of ``like``, repeats: each once."""
    for dim, step in enumerate((value if like is None else like).stride()):
        if not step and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value
