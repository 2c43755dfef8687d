"""Outlines that are laid out anew: which of torch's functions return views, and which copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gascompile.core.strides import contiguous_strides
from gascompile.integrations.onnx.outline import DType, Outline, now, op

_MOST_PIECES = 1 << 16
"""Of one op, as in a capture."""


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that tensors of such shapes have together; raises ``ValueError`` where they do not fit."""
    sizes = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(reversed(shape), 1):
            if size != 1:
                if sizes[-axis] not in (1, size):
                    raise ValueError(f"sizes {list(shapes)} do not fit each other")
                sizes[-axis] = size
    return tuple(sizes)


def fresh(like: Outline, shape: Sequence[int], dtype: DType | None = None) -> Outline:
    """Return a new contiguous tensor, of the dtype of another by default."""
    return Outline(shape, dtype or like.dtype)


@op("clone")
def clone(x: Outline) -> Outline:
    """Return a contiguous copy."""
    made = fresh(x, x.shape)
    now().leaf("clone.default", [x], [made])
    return made


def sizes_of(x: Outline, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return a shape in which -1 is what is left; raises ``ValueError``."""
    count = math.prod(size for size in wanted if size != -1)
    shape = tuple((x.numel() // count if count else 0) if size == -1 else size for size in wanted)
    if math.prod(shape) != x.numel() or sum(size == -1 for size in wanted) > 1:
        raise ValueError(f"{list(x.shape)} cannot become {list(wanted)}")
    return shape


def _view_strides(x: Outline, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a view of a shape; ``None`` where values do not lie so."""
    if not x.numel() or not x.shape:
        return contiguous_strides(shape) if x.is_contiguous() else None
    strides = [0] * len(shape)
    at = len(shape) - 1
    base, run, wanted = x.stride()[-1], 1, 1
    for dim in reversed(range(x.dim())):
        run *= x.shape[dim]
        ends = dim == 0 or (x.shape[dim - 1] != 1 and x.stride()[dim - 1] != run * base)
        if not ends:
            continue
        while at >= 0 and (wanted < run or shape[at] == 1):
            strides[at] = wanted * base
            wanted *= shape[at]
            at -= 1
        if wanted != run:
            return None
        if dim > 0:
            base, run, wanted = x.stride()[dim - 1], 1, 1
    return tuple(strides) if at == -1 else None


def _reshaped(x: Outline, wanted: Sequence[int]) -> Outline:
    shape = sizes_of(x, wanted)
    stride = _view_strides(x, shape)
    if stride is not None:
        return x.view(shape, stride)
    return clone(x).view(shape, contiguous_strides(shape))


@op("reshape")
def reshape(x: Outline, *wanted: Any) -> Outline:
    """Return a view, or a copy where values do not lie so."""
    return _reshaped(x, wanted[0] if isinstance(wanted[0], (list, tuple)) else wanted)


@op("permute")
def permute(x: Outline, dims: Sequence[int]) -> Outline:
    """Return a view with dimensions in another order."""
    if sorted(dims) != list(range(x.dim())):
        raise ValueError(f"{list(dims)} are no order of {x.dim()} dimensions")
    return x.view([x.shape[d] for d in dims], [x.stride()[d] for d in dims])


@op("t")
def t(x: Outline) -> Outline:
    """Return a matrix transposed."""
    return x.view(x.shape[::-1], x.stride()[::-1])


@op("squeeze")
def squeeze(x: Outline, dims: Sequence[int]) -> Outline:
    """Return a view without dimensions of one."""
    kept = [d for d in range(x.dim()) if d not in dims or x.shape[d] != 1]
    return x.view([x.shape[d] for d in kept], [x.stride()[d] for d in kept])


@op("unsqueeze")
def unsqueeze(x: Outline, dim: int) -> Outline:
    """Return a view with one dimension of one more."""
    at = dim + x.dim() + 1 if dim < 0 else dim
    if not 0 <= at <= x.dim():
        raise IndexError(f"{dim} is no place among {x.dim()} dimensions")
    step = x.shape[at] * x.stride()[at] if at < x.dim() else 1
    shape, stride = list(x.shape), list(x.stride())
    shape.insert(at, 1)
    stride.insert(at, step)
    return x.view(shape, stride)


@op("expand")
def expand(x: Outline, shape: Sequence[int]) -> Outline:
    """Return a view with values repeated."""
    missing = len(shape) - x.dim()
    if broadcast_shapes(x.shape, shape) != tuple(shape) or missing < 0:
        raise ValueError(f"{list(x.shape)} cannot become {list(shape)}")
    stride = [0] * missing + [
        step if size == wanted else 0
        for size, step, wanted in zip(x.shape, x.stride(), shape[missing:], strict=True)
    ]
    return x.view(shape, stride)


@op("repeat")
def repeat(x: Outline, repeats: Sequence[int]) -> Outline:
    """Return copies side by side."""
    missing = len(repeats) - x.dim()
    if missing < 0:
        raise ValueError(f"{list(repeats)} are less than {x.dim()} dimensions")
    shape = (1,) * missing + x.shape
    made = fresh(x, [size * times for size, times in zip(shape, repeats, strict=True)])
    now().leaf("repeat.default", [x], [made])
    return made


def _dim_of(x: Outline, dim: int) -> int:
    at = dim + x.dim() if dim < 0 else dim
    if not 0 <= at < x.dim():
        raise IndexError(f"{dim} is none of {x.dim()} dimensions")
    return at


@op("select")
def select(x: Outline, dim: int, index: int) -> Outline:
    """Return a view without a dimension, at a place of it."""
    at = _dim_of(x, dim)
    if not -x.shape[at] <= index < x.shape[at]:
        raise IndexError(f"{index} is none of {x.shape[at]}")
    others = [d for d in range(x.dim()) if d != at]
    return x.view([x.shape[d] for d in others], [x.stride()[d] for d in others])


@op("slice")
def slice_(x: Outline, dim: int, begin: int, end: int, step: int) -> Outline:
    """Return a view of a range of a dimension."""
    at = _dim_of(x, dim)
    shape, stride = list(x.shape), list(x.stride())
    shape[at] = len(range(*slice(begin, end, step).indices(x.shape[at])))
    stride[at] *= step
    return x.view(shape, stride)


@op("getitem")
def _getitem(values: Sequence[Outline], place: int) -> Outline:
    return values[place]


@op("split_with_sizes")
def _split(x: Outline, parts: Sequence[int], at: int) -> list[Outline]:
    if sum(parts) != x.shape[at]:
        raise ValueError(f"{list(parts)} are not {x.shape[at]} together")
    return [x.view([*x.shape[:at], part, *x.shape[at + 1 :]], x.stride()) for part in parts]


def split(x: Outline, parts: Sequence[int], dim: int = 0) -> tuple[Outline, ...]:
    """Return views of consecutive ranges of a dimension."""
    return _each(_split(x, parts, _dim_of(x, dim)))


@op("unbind")
def _unbind(x: Outline, at: int) -> list[Outline]:
    others = [d for d in range(x.dim()) if d != at]
    shape, stride = [x.shape[d] for d in others], [x.stride()[d] for d in others]
    return [x.view(shape, stride) for _ in range(x.shape[at])]


def unbind(x: Outline, dim: int = 0) -> tuple[Outline, ...]:
    """Return a view for each place of a dimension; raises ``ValueError`` for more than any model has."""
    if x.shape[_dim_of(x, dim)] > _MOST_PIECES:
        raise ValueError(f"{list(x.shape)} would be divided into more than {_MOST_PIECES} pieces")
    return _each(_unbind(x, _dim_of(x, dim)))


def _each(values: Sequence[Outline]) -> tuple[Outline, ...]:
    """Return parts of a result one by one, each an op of its own."""
    return tuple(_getitem(values, place) for place in range(len(values)))
