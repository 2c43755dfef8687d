"""The functions of torch that the table of ONNX ops calls, for outlines: sizes, strides and kernels of each.

Names and arguments are torch's. A composite op calls others here, as it does in torch: those are its kernels and views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from gascompile.integrations.onnx.outline import DTYPES, DType, Outline, now, op, promoted
from gascompile.integrations.onnx.outline_pointwise import (
    POINTWISE,
    clamp,
    div,
    elu,
    gelu,
    laid_out,
    leaky_relu,
    nan_to_num,
    to,
    where,
)
from gascompile.integrations.onnx.outline_products import (
    addmm,
    conv1d,
    conv2d,
    conv3d,
    einsum,
    linear,
    matmul,
    scaled_dot_product_attention,
)
from gascompile.integrations.onnx.outline_views import (
    broadcast_shapes,
    expand,
    fresh,
    permute,
    repeat,
    reshape,
    select,
    slice_,
    split,
    squeeze,
    t,
    unbind,
    unsqueeze,
)

__all__ = [
    "addmm",
    "broadcast_shapes",
    "clamp",
    "conv1d",
    "conv2d",
    "conv3d",
    "div",
    "einsum",
    "elu",
    "expand",
    "gelu",
    "leaky_relu",
    "linear",
    "matmul",
    "nan_to_num",
    "permute",
    "repeat",
    "reshape",
    "scaled_dot_product_attention",
    "select",
    "split",
    "squeeze",
    "t",
    "to",
    "unbind",
    "unsqueeze",
    "where",
]  # fmt: skip

Tensor = Outline
ops = SimpleNamespace(aten=SimpleNamespace(slice=SimpleNamespace(Tensor=slice_)))


class SymInt:
    """Sizes of outlines are numbers; none is of this type."""


def __getattr__(name: str) -> Any:
    if name in POINTWISE:
        return POINTWISE[name]
    if name in DTYPES:
        return DTYPES[name]
    raise AttributeError(f"outlines have no function {name!r}")


def _same_shape(name: str, leaf: str) -> Callable[..., Outline]:
    @op(name)
    def run(x: Outline, *options: Any, **named: Any) -> Outline:
        made = fresh(x, x.shape)
        now().leaf(leaf, [x], [made])
        return made

    return run


softmax, log_softmax = _same_shape("softmax", "_softmax"), _same_shape("log_softmax", "_log_softmax")  # fmt: skip
triu, tril, cumsum = (_same_shape(name, name) for name in ("triu", "tril", "cumsum"))


def _reduced(x: Outline, dims: Sequence[int], *, keepdim: bool) -> list[int]:
    at = {d % x.dim() for d in dims} if x.dim() else set()
    if keepdim:
        return [1 if d in at else size for d, size in enumerate(x.shape)]
    return [size for d, size in enumerate(x.shape) if d not in at]


def _reduction(name: str) -> Callable[..., Outline]:
    @op(name)
    def run(x: Outline, dims: Sequence[int], keepdim: bool = False, dtype: Any = None) -> Outline:
        made = fresh(x, _reduced(x, dims, keepdim=keepdim), dtype)
        now().leaf(name, [x], [made])
        return made

    return run


sum, mean, amax, amin = (_reduction(name) for name in ("sum", "mean", "amax", "amin"))  # noqa: A001


def _arg(name: str) -> Callable[..., Outline]:
    @op(name)
    def run(x: Outline, axis: int, keepdim: bool = False) -> Outline:
        made = fresh(x, _reduced(x, [axis], keepdim=keepdim), DTYPES["int64"])
        now().leaf(name, [x], [made])
        return made

    return run


argmax, argmin = _arg("argmax"), _arg("argmin")


@op("layer_norm")
def layer_norm(
    x: Outline, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 0.0
) -> Outline:
    """Of the last dimensions, with their means and deviations beside the result."""
    given = [v for v in (x, weight, bias) if v is not None]
    rest = x.shape[: x.dim() - len(shape)]
    made = fresh(x, x.shape)
    statistics = [fresh(x, (*rest, *[1] * len(shape))) for _ in range(2)]
    now().leaf("native_layer_norm", given, [made, *statistics])
    return made


@op("rms_norm")
def rms_norm(x: Outline, shape: Sequence[int], weight: Any = None, eps: float = 0.0) -> Outline:
    """Of the last dimensions, by their mean square; reduced types are computed as floats."""
    wide = to(x, DTYPES["float32"]) if x.element_size() < 4 else x
    dims = range(x.dim() - len(shape), x.dim())
    added = POINTWISE["add"](mean(POINTWISE["pow"](wide, 2), dims, keepdim=True), eps)
    result: Outline = POINTWISE["mul"](wide, POINTWISE["sqrt"](added))
    return to(result, x.dtype)


def batch_norm(
    x: Outline, mean: Outline, var: Outline, weight: Outline, bias: Outline, **options: Any
) -> Outline:
    """With means that are kept."""
    return _batch_norm(x, weight, bias, mean, var)


@op("batch_norm")
def _batch_norm(x: Outline, *given: Outline) -> Outline:
    reserved = fresh(x, (0,), DTYPES["uint8"])
    now().leaf("empty", [], [reserved])
    made = Outline(x.shape, x.dtype, stride=laid_out([x], x.shape))
    rest = [fresh(x, (0,)) for _ in range(2)]
    now().leaf("native_batch_norm", [x, *given], [made, *rest])
    return made


@op("group_norm")
def group_norm(
    x: Outline, groups: int, weight: Any = None, bias: Any = None, eps: float = 0.0
) -> Outline:
    """Of groups of channels."""
    made = fresh(x, x.shape)
    rest = [fresh(x, (x.shape[0], groups)) for _ in range(2)]
    given = [v for v in (x, weight, bias) if v is not None]
    now().leaf("native_group_norm", given, [made, *rest])
    return made


def _max_pool(rank: int) -> Callable[..., Outline]:
    @op(f"max_pool{rank}d")
    def run(
        x: Outline, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> Outline:  # fmt: skip
        spatial = [
            (size + 2 * pad - gap * (window - 1) - 1) // step + 1
            for size, window, step, pad, gap in zip(
                x.shape[2:], kernel, stride, padding, dilation, strict=True
            )
        ]
        made = fresh(x, (*x.shape[:2], *spatial))
        numbers = fresh(x, made.shape, DTYPES["int64"])
        now().leaf(f"max_pool{rank}d_with_indices", [x], [made, numbers])
        return made

    return run


max_pool1d, max_pool2d, max_pool3d = _max_pool(1), _max_pool(2), _max_pool(3)


@op("pad")
def pad(x: Outline, around: Sequence[int], value: Any = 0) -> Outline:
    """With a constant around."""
    shape = list(x.shape)
    for place in range(len(around) // 2):
        shape[-1 - place] += around[2 * place] + around[2 * place + 1]
    if any(size < 0 for size in shape):
        raise ValueError(f"{list(x.shape)} cannot be cut by {list(around)}")
    made = fresh(x, shape)
    now().leaf("constant_pad_nd", [x], [made])
    return made


def embedding(indices: Outline, weight: Outline) -> Outline:
    """Rows by their numbers."""
    return _embedding(weight, indices)


@op("embedding")
def _embedding(weight: Outline, indices: Outline) -> Outline:
    made = fresh(weight, (*indices.shape, weight.shape[1]))
    now().leaf("embedding", [weight, indices], [made], rows=True)
    return made


@op("index_select")
def index_select(x: Outline, dim: int, indices: Outline) -> Outline:
    """Places of a dimension by their numbers."""
    made = fresh(x, [*x.shape[:dim], indices.numel(), *x.shape[dim + 1 :]])
    now().leaf("index_select", [x, indices], [made], rows=True)
    return made


@op("gather")
def gather(x: Outline, dim: int, indices: Outline) -> Outline:
    """One value for each number."""
    made = fresh(x, indices.shape)
    now().leaf("gather", [x, indices], [made], rows=True)
    return made


@op("index")
def index(x: Outline, indices: Sequence[Outline]) -> Outline:
    """Values or rows at places of the first dimensions."""
    places = broadcast_shapes(*(i.shape for i in indices))
    made = fresh(x, (*places, *x.shape[len(indices) :]))
    now().leaf("index", [x, *indices], [made])
    return made


@op("index_put")
def index_put(
    x: Outline, indices: Sequence[Outline], values: Outline, accumulate: bool = False
) -> Outline:
    """With other values at places of the first dimensions."""
    made = fresh(x, x.shape)
    now().leaf("index_put", [x, *indices, values], [made])
    return made


def _scatter(name: str) -> Callable[..., Outline]:
    @op(name)
    def run(x: Outline, dim: int, indices: Outline, values: Outline) -> Outline:
        made = fresh(x, x.shape)
        now().leaf(name, [x, indices, values], [made])
        return made

    return run


scatter, scatter_add = _scatter("scatter"), _scatter("scatter_add")


@op("cat")
def cat(values: Sequence[Outline], dim: int = 0) -> Outline:
    """One after the other along a dimension."""
    first = values[0]
    at = dim % first.dim()
    if any(
        v.shape[:at] + v.shape[at + 1 :] != first.shape[:at] + first.shape[at + 1 :] for v in values
    ):
        raise ValueError(f"sizes {[list(v.shape) for v in values]} do not fit along {dim}")
    length = math.fsum(v.shape[at] for v in values)
    made = fresh(first, [*first.shape[:at], int(length), *first.shape[at + 1 :]], promoted(values))
    now().leaf("cat", values, [made])
    return made


@op("stack")
def stack(values: Sequence[Outline]) -> Outline:
    """Side by side along a new first dimension."""
    made = fresh(values[0], (len(values), *values[0].shape))
    now().leaf("stack", values, [made])
    return made


@op("full")
def full(shape: Sequence[int], value: Any, dtype: DType) -> Outline:
    """One value everywhere."""
    made = Outline(shape, dtype)
    now().leaf("full", [], [made])
    return made


@op("arange")
def arange(*ends: Any, dtype: DType = DTYPES["int64"]) -> Outline:
    """Numbers from one to before another."""
    made = Outline((len(range(*map(int, ends))),), dtype)
    now().leaf("arange", [], [made])
    return made


@op("scalar_tensor")
def scalar_tensor(value: Any, dtype: DType) -> Outline:
    """A number."""
    made = Outline((), dtype)
    now().leaf("scalar_tensor", [], [made])
    return made


def tensor(value: Any, dtype: DType | None = None) -> Outline:
    """Return a constant: numbers that are kept, as a capture keeps them."""
    parts = value if isinstance(value, list) else [value]
    kind = dtype or (DTYPES["bool"] if all(isinstance(p, bool) for p in parts) else DTYPES["int64"])
    kept = now().constant((len(parts),) if isinstance(value, list) else (), kind)
    copy = _detach(_lift_fresh_copy(kept))
    now().copies[kept.storage.name] = copy.op
    return copy


@op("lift_fresh_copy")
def _lift_fresh_copy(x: Outline) -> Outline:
    made = fresh(x, x.shape)
    now().leaf("lift_fresh_copy", [x], [made])
    return made


@op("detach_")
def _detach(x: Outline) -> Outline:
    now().rewrites(x)
    return x
