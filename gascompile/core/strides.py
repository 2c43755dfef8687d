"""Strides: how the elements of a tensor lie in memory, by numbers alone.

Dimensions of size 1 have strides that no element depends on; the functions here agree on what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""Dimensions from the innermost one outwards, of images and volumes whose channels lie side by side."""


def normal_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``stride`` with those of dimensions of size 1 replaced by what the dimension inside them spans.

    A tensor that is contiguous has the strides of a new one, in whichever way it came to be, unless ops would lay out
    their results in another way for these: of images whose channels are last by their strides, they stay so.
    """
    if 0 in shape:
        return contiguous_strides(shape)
    if any(step == 0 for size, step in zip(shape, stride, strict=True) if size > 1):
        return tuple(
            stride
        )  # results laid out alike have their dimensions in the order of all strides
    is_last = _is_channels_last(shape, stride)
    orders = [tuple(range(len(shape) - 1, -1, -1))]
    if is_last:
        orders.append(_CHANNELS_LAST[len(shape)])
    for order in orders:
        filled = _filled(shape, stride, order)
        if _is_channels_last(shape, filled) == is_last:
            return filled
    return tuple(stride)


def _filled(
    shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...]
) -> tuple[int, ...]:
    """Return ``stride`` with those of dimensions of size 1 by the ones before them in ``order``, all if it is dense."""
    dense, step = [0] * len(shape), 1
    for dim in order:
        dense[dim] = step
        step *= shape[dim]
    if all(a == b for n, a, b in zip(shape, stride, dense, strict=True) if n > 1):
        return tuple(dense)
    normal, step = list(stride), 1
    for dim in order:
        if shape[dim] == 1:
            normal[dim] = step
        step = normal[dim] * shape[dim]
    return tuple(normal)


def _is_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether torch takes a tensor of these strides for one whose channels are last.

    Source: ``is_channels_last_strides_2d`` in c10/core/MemoryFormat.h.
    """
    least = 0
    if len(shape) not in _CHANNELS_LAST or not stride[1]:
        return False
    for dim in _CHANNELS_LAST[len(shape)]:
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * shape[dim]
    return True


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


def repeats(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements of a tensor lie in one place, as those of an expansion do."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1)
    if 0 in shape or not dims:
        return False
    if not dims[0][0]:
        return True
    span, is_apart = 1, True
    for step, size in dims:
        is_apart = is_apart and step >= span
        span += step * (size - 1)
    if is_apart:
        return False
    places = {0}
    for step, size in dims:
        moved = {place + step * number for place in places for number in range(size)}
        if len(moved) < len(places) * size:
            return True
        places = moved
    return False


def distinct(value: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``value`` without the elements that an expansion, of it or of ``like``, repeats: each once."""
    for dim, step in enumerate((value if like is None else like).stride()):
        if not step and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value
