"""ONNX ops that lay values out anew, and those that shapes are computed with: what they mean in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.onnx.values import (
    Value,
    dims_of,
    each,
    is_known,
    number,
    sizes,
    tensor,
    wrapped,
)

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    from gascompile.integrations.onnx.backend import functional, torch

_MOST_SIZES = 4096
"""Of a list; files that double one again and again would fill memory."""
_NO_END = (2**31 - 1, 2**63 - 1)
"""What a range ends at that has all that follows."""


def shape(x: Value, *, start: int = 0, end: int | None = None) -> Value:
    """Sizes, of a range of dimensions."""
    return list(tensor(x).shape)[start:end]


def size(x: Value) -> Value:
    """The number of values."""
    return tensor(x).numel()


def reshape(x: Value, to: Value, *, allowzero: int = 0) -> Value:
    """0 keeps a size, unless ``allowzero``; -1 takes what is left."""
    wanted = sizes(to, "shape")
    if is_known(x) and len(wanted) == 1:
        return x if isinstance(x, list) else [x]
    data = tensor(x)
    if not allowzero:
        wanted = [
            data.shape[axis] if isinstance(dim, int) and dim == 0 else dim
            for axis, dim in enumerate(wanted)
        ]
    return data.reshape(wanted)


def flatten(x: torch.Tensor, *, axis: int = 1) -> torch.Tensor:
    """Two dimensions: those before an axis, and the others."""
    at = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:at]), math.prod(x.shape[at:]))


def transpose(x: torch.Tensor, *, perm: Sequence[int] | None = None) -> torch.Tensor:
    """Dimensions in another order, reversed by default."""
    return x.permute(list(perm) if perm is not None else list(range(x.dim()))[::-1])


def squeeze(x: Value, axes: Value | None = None) -> Value:
    """Without dimensions of one."""
    if isinstance(x, list):
        return number(x, "input")  # type: ignore[no-any-return]
    data = tensor(x)
    if axes is None:
        return data.reshape([dim for dim in data.shape if dim != 1])
    dims = dims_of(sizes(axes, "axes"), data.dim())
    if not dims:
        raise UnsupportedOpError(
            "its list of axes is empty, which onnxruntime and ONNX itself take for all and for none"
        )
    if any(data.shape[dim] != 1 for dim in dims):
        raise UnsupportedOpError(f"its axes {dims} are not all of one, of {list(data.shape)}")
    return data.squeeze(dims)


def unsqueeze(x: Value, axes: Value) -> Value:
    """With dimensions of one, at axes of the result."""
    wanted = sizes(axes, "axes")
    if is_known(x) and not isinstance(x, list) and wanted in ([0], [-1]):
        return [x]
    data = tensor(x)
    for axis in sorted(dims_of(wanted, data.dim() + len(wanted))):
        data = data.unsqueeze(axis)
    return data


def concat(*values: Value, axis: int) -> Value:
    """One after the other along an axis."""
    if all(isinstance(value, list) for value in values):
        if sum(map(len, values)) > _MOST_SIZES:  # type: ignore[arg-type]
            raise UnsupportedOpError(f"it makes a list of more than {_MOST_SIZES} sizes")
        return [part for value in values for part in value]  # type: ignore[union-attr]
    return torch.cat([tensor(value) for value in values], dim=axis)


def split(
    x: torch.Tensor, parts: Value | None = None, *, axis: int = 0, num_outputs: int | None = None, results: int
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Parts of given sizes, or of equal ones of which the last may be smaller."""
    length = x.shape[axis]
    if parts is not None:
        return torch.split(x, sizes(parts, "split"), dim=axis)
    if num_outputs is None and length % results:
        raise UnsupportedOpError(f"{length} values cannot be divided into {results} equal parts")
    if num_outputs is not None and num_outputs != results:
        raise UnsupportedOpError(f"it has {results} outputs, and num_outputs is {num_outputs}")
    part = -(-length // results)
    return torch.split(x, [part] * (results - 1) + [length - part * (results - 1)], dim=axis)


def expand(x: Value, to: Value) -> torch.Tensor:
    """Broadcast with a shape, either way."""
    data = tensor(x)
    return data.expand(torch.broadcast_shapes(data.shape, tuple(sizes(to, "shape"))))


def tile(x: torch.Tensor, repeats: Value) -> torch.Tensor:
    """Repeated along each axis."""
    return x.repeat(sizes(repeats, "repeats"))


def pad(
    x: torch.Tensor, pads: Value, value: Any = None, axes: Value | None = None, *, mode: str = "constant"
) -> torch.Tensor:  # fmt: skip
    """With a constant around; negative pads cut."""
    if mode != "constant":
        raise UnsupportedOpError(f"its mode is {mode!r}; constant is supported")
    around = sizes(pads, "pads")
    dims = dims_of(sizes(axes, "axes"), x.dim()) if axes is not None else list(range(x.dim()))
    if len(around) != 2 * len(dims):
        raise UnsupportedOpError(f"it has {len(around)} pads for {len(dims)} axes")
    both = [0] * (2 * x.dim())
    for at, dim in enumerate(dims):
        both[2 * (x.dim() - 1 - dim)] = around[at]
        both[2 * (x.dim() - 1 - dim) + 1] = around[len(dims) + at]
    return functional.pad(x, both, value=0 if value is None else number(value, "constant_value"))


def slice_(
    x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Value:
    """Ranges along axes, forwards as Python's slices."""
    begins, stops = sizes(starts, "starts"), sizes(ends, "ends")
    strides = sizes(steps, "steps") if steps is not None else [1] * len(begins)
    rank = 1 if isinstance(x, list) else tensor(x).dim()
    dims = dims_of(sizes(axes, "axes") if axes is not None else list(range(len(begins))), rank)
    if not len(begins) == len(stops) == len(dims) == len(strides):
        raise UnsupportedOpError("its starts, ends, axes and steps are not of one length")
    for begin, stop, dim, step in zip(begins, stops, dims, strides, strict=True):
        if step > 0:
            x = (
                x[begin:stop:step] if isinstance(x, list)
                else torch.ops.aten.slice.Tensor(tensor(x), dim, begin, stop, step)
            )  # fmt: skip
        elif isinstance(x, list):
            first, end = _backwards(len(x), begin, stop)
            x = [x[at] for at in range(first, end, step)]
        else:
            first, end = _backwards(tensor(x).shape[dim], begin, stop)
            x = torch.index_select(tensor(x), dim, torch.arange(first, end, step))
    return x


def _backwards(length: Any, begin: Any, stop: Any) -> tuple[int, int]:
    """Return where a range begins that goes backwards, and where it ends: at most there, at least before the first."""
    if not all(isinstance(n, int) for n in (length, begin, stop)):
        raise UnsupportedOpError("it goes backwards through a dimension that is not constant")
    if stop in _NO_END and length:
        raise UnsupportedOpError(
            f"it goes backwards to {stop}, which onnxruntime takes for the first value and ONNX itself for the last"
        )
    # Other than in Python's slices, what begins before the first value has that one.
    begin = min(max(begin + length if begin < 0 else begin, 0), length - 1)
    stop = max(stop + length if stop < 0 else stop, -1)
    return begin, min(stop, begin)


def gather(data: Value, indices: Value, *, axis: int = 0) -> Value:
    """Rows by their number, which may count from the end."""
    if isinstance(data, list) and is_known(indices):
        one = not isinstance(indices, list)
        picked: list[Any] = [data[at] for at in sizes([indices] if one else indices, "indices")]
        return picked[0] if one else picked
    rows = tensor(data)
    dim = dims_of([axis], rows.dim())[0]
    if isinstance(indices, int):
        return rows.select(dim, indices)
    at = wrapped(tensor(indices), rows.shape[dim])
    if dim == 0 and rows.dim() == 2:
        return functional.embedding(at, rows)
    picked_rows = torch.index_select(rows, dim, at.reshape(-1))
    return picked_rows.reshape([*rows.shape[:dim], *at.shape, *rows.shape[dim + 1 :]])


def gather_elements(data: torch.Tensor, indices: Value, *, axis: int = 0) -> torch.Tensor:
    """One value for each index."""
    at = wrapped(tensor(indices).to(torch.int64), data.shape[axis])
    return torch.gather(data, axis, at)


def _nd_indices(data: torch.Tensor, indices: torch.Tensor, batch_dims: int) -> list[torch.Tensor]:
    last: Any = indices.shape[-1]
    if isinstance(last, torch.SymInt):
        raise UnsupportedOpError("the last dimension of its indices is not constant")
    batch = [
        torch.arange(data.shape[dim]).reshape([-1] + [1] * (indices.dim() - 2 - dim))
        for dim in range(batch_dims)
    ]
    parts = [wrapped(part, data.shape[batch_dims + n]) for n, part in enumerate(indices.unbind(-1))]
    return [*batch, *parts]


def gather_nd(data: torch.Tensor, indices: Value, *, batch_dims: int = 0) -> torch.Tensor:
    """Values or rows at places that the last dimension of the indices gives."""
    picked: torch.Tensor = data[tuple(_nd_indices(data, tensor(indices), batch_dims))]
    return picked


def scatter_nd(
    data: torch.Tensor, indices: Value, updates: torch.Tensor, *, reduction: str = "none"
) -> torch.Tensor:
    """With other values at places that the last dimension of the indices gives."""
    if reduction not in ("none", "add"):
        raise UnsupportedOpError(f"its reduction is {reduction!r}; none and add are supported")
    at = _nd_indices(data, tensor(indices), 0)
    return torch.index_put(data, tuple(at), updates, accumulate=reduction == "add")


def scatter_elements(
    data: torch.Tensor, indices: Value, updates: torch.Tensor, *, axis: int = 0, reduction: str = "none"
) -> torch.Tensor:  # fmt: skip
    """With one other value for each index."""
    if reduction not in ("none", "add"):
        raise UnsupportedOpError(f"its reduction is {reduction!r}; none and add are supported")
    at = wrapped(tensor(indices).to(torch.int64), data.shape[axis])
    if reduction == "add":
        return torch.scatter_add(data, axis, at, updates)
    return torch.scatter(data, axis, at, updates)


def constant_of_shape(to: Value, *, value: Any = ("float32", 0.0)) -> Value:
    """One value everywhere."""
    name, content = value
    dtype = getattr(torch, name)
    wanted = sizes(to, "shape")
    if dtype == torch.int64 and len(wanted) == 1 and isinstance(wanted[0], int) and wanted[0] <= 64:
        return [content] * wanted[0]
    return torch.full(wanted, content, dtype=dtype)


def range_(start: Value, limit: Value, delta: Value, *, result_dtype: str) -> torch.Tensor:
    """Whole numbers from a start to before a limit."""
    if result_dtype not in ("int16", "int32", "int64"):
        raise UnsupportedOpError(f"it counts in {result_dtype}; whole numbers are supported")
    ends = (number(v, n) for v, n in ((start, "start"), (limit, "limit"), (delta, "delta")))
    return torch.arange(*ends, dtype=getattr(torch, result_dtype))


def where(condition: Value, x: Value, y: Value) -> Value:
    """One of two values each."""
    if is_known(condition, x, y):
        return each(lambda c, a, b: a if c else b, condition, x, y)  # type: ignore[arg-type]
    return torch.where(tensor(condition, "bool"), tensor(x), tensor(y))


def trilu(x: torch.Tensor, k: Value | None = None, *, upper: int = 1) -> torch.Tensor:
    """The part above or below a diagonal."""
    diagonal = 0 if k is None else number(k, "k")
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)
