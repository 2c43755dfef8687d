"""ONNX ops that compute with values: what they mean in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.onnx.values import (
    Value,
    dims_of,
    each,
    is_known,
    number,
    sizes,
    tensor,
)

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    from gascompile.integrations.onnx.backend import functional, torch

Tensor: TypeAlias = "torch.Tensor"


def unary(name: str) -> Callable[..., Value]:
    """Return the op that is torch's of a name."""
    return lambda x: getattr(torch, name)(tensor(x))


def binary(name: str, known: Callable[[Any, Any], Any] | None = None) -> Callable[..., Value]:
    """Return the op of two values that is torch's of a name; ``known`` computes it where both are sizes."""

    def op(a: Value, b: Value) -> Value:
        if known is not None and is_known(a, b):
            return each(known, a, b)  # type: ignore[arg-type]
        return getattr(torch, name)(tensor(a), tensor(b))  # type: ignore[no-any-return]

    return op


def many(name: str) -> Callable[..., Tensor]:
    """Return the op of any number of values that is torch's of a name for two."""
    return lambda *values: reduce(getattr(torch, name), [tensor(value) for value in values])


def divide(a: Value, b: Value) -> Value:
    """Whole numbers are cut towards zero."""
    if is_known(a, b):
        return each(_quotient, a, b)  # type: ignore[arg-type]
    x, y = tensor(a), tensor(b)
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if isinstance(b, int) and b > 0:
        # Python's // goes down, which below zero is not towards it. Of what is never below, torch leaves half out.
        return torch.sym_max(a, 0) // b - torch.sym_max(-a, 0) // b
    raise UnsupportedOpError("it divides sizes by what may be negative")


def power(x: Tensor, y: Any) -> Tensor:
    """The result is of the base's dtype."""
    if not x.is_floating_point():
        raise UnsupportedOpError(f"its base is of {x.dtype}; floating ones are supported")
    return torch.pow(x, y if isinstance(y, (int, float)) else tensor(y)).to(x.dtype)


def modulo(a: Value, b: Value, *, fmod: int = 0) -> Tensor:
    """The remainder with the sign of the divisor, or of the dividend."""
    x, y = tensor(a), tensor(b)
    if x.is_floating_point() and not fmod:
        raise UnsupportedOpError("it takes the remainder of floating values without fmod=1")
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


def sign(x: Value) -> Tensor:
    """Minus one, zero or one; NaN stays NaN."""
    data = tensor(x)
    found = torch.sign(data)
    # Torch's of NaN is zero, as is onnxruntime's of the smaller floats.
    if data.dtype not in (torch.float32, torch.float64):
        return found
    return torch.where(torch.isnan(data), data, found)


def clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Between two limits, each of which may be missing; one that is NaN is none, as in onnxruntime."""
    ends = {
        name: _limit(value, none)
        for name, value, none in (("min", low, -math.inf), ("max", high, math.inf))
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }
    return torch.clamp(x, **ends) if ends else x


def _limit(value: Any, none: float) -> Any:
    if isinstance(value, (int, float)):
        return value
    limit = tensor(value)
    if not limit.is_floating_point():
        return limit
    return torch.nan_to_num(limit, nan=none, posinf=math.inf, neginf=-math.inf)


def cast(x: Value, *, to: str, saturate: int = 1) -> Value:
    """In another dtype; to whole numbers values are cut towards zero."""
    if to == "int64" and is_known(x):
        return each(lambda n: int(n) if isinstance(n, bool) else n, x)  # type: ignore[arg-type]
    return tensor(x).to(getattr(torch, to))


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Of one axis."""
    return torch.softmax(x, axis)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Of one axis."""
    return torch.log_softmax(x, axis)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Exact, or by tanh."""
    return functional.gelu(x, approximate=approximate)


def leaky_relu(x: Tensor, *, alpha: float = 0.009999999776482582) -> Tensor:
    """Negative values times a slope."""
    return functional.leaky_relu(x, alpha)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Exponential below zero."""
    return functional.elu(x, alpha)


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - ONNX's name
    transB: int = 0,  # noqa: N803 - ONNX's name
) -> Tensor:  # fmt: skip
    """A product of matrices and what is added to it."""
    if not a.is_floating_point():
        raise UnsupportedOpError(f"it multiplies {a.dtype}; floating matrices are supported")
    x = a.t() if transA else a
    if alpha == 1.0 and beta == 1.0 and transB and (c is None or tuple(c.shape) == (b.shape[0],)):
        return functional.linear(x, b, c)
    other = b.t() if transB else b
    if alpha == 1.0 and beta == 1.0 and c is not None and tuple(c.shape) == (other.shape[1],):
        return torch.addmm(c, x, other)
    product = torch.matmul(x, other)
    product = product if alpha == 1.0 else product * alpha
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else c * beta)


def silu(x: Tensor) -> Tensor:
    """A value times its sigmoid."""
    return functional.silu(x)


def hard_swish(x: Tensor) -> Tensor:
    """A value times a piece-wise linear sigmoid."""
    return functional.hardswish(tensor(x))


def softplus(x: Tensor) -> Tensor:
    """The logarithm of one and an exponential."""
    return functional.softplus(tensor(x))


def linear(x: Value, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with a transposed matrix, and what is added to it."""
    return functional.linear(tensor(x), weight, bias)


def einsum(*values: Tensor, equation: str) -> Tensor:
    """Products and sums by index letters."""
    return torch.einsum(equation, *values)


def reducer(
    compute: Callable[[Tensor, list[int], bool], Tensor], *, whole: bool = False, single: str = ""
) -> Callable[..., Value]:
    """Return the op that takes dimensions together.

    Args:
        compute: that of torch, for a tensor, dimensions, and whether they stay.
        whole: of whole numbers, too.
        single: what torch calls it for a single number; nothing where that is the number itself.
    """

    def op(
        x: Value, given: Value | None = None, *, axes: Sequence[int] | None = None, keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Value:  # fmt: skip
        data = tensor(x)
        if data.dtype == torch.bool or (not whole and not data.is_floating_point()):
            raise UnsupportedOpError(f"it is not supported for {data.dtype}")
        wanted = sizes(given, "axes") if given is not None else list(axes or ())
        if not wanted and noop_with_empty_axes:
            raise UnsupportedOpError("it has no axes and noop_with_empty_axes=1")
        dims = dims_of(wanted, data.dim()) or list(range(data.dim()))
        if not data.dim():
            return unary(single)(data) if single else data
        return compute(data, dims, bool(keepdims))

    return op


def arg(name: str) -> Callable[..., Tensor]:
    """Return the op of torch's that finds the first largest or smallest value.

    NaN is larger and smaller than all others, as in numpy and ONNX's own evaluator. To onnxruntime it is so where it
    comes first, and nothing elsewhere, which would take five ops for what models do not ask of it.
    """

    def op(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if select_last_index:
            raise UnsupportedOpError("select_last_index=1 is not supported")
        return getattr(torch, name)(x, axis, keepdim=bool(keepdims))  # type: ignore[no-any-return]

    return op


def cumsum(x: Tensor, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sums so far."""
    if exclusive or reverse:
        raise UnsupportedOpError("exclusive=1 and reverse=1 are not supported")
    return torch.cumsum(x, number(axis, "axis"), dtype=x.dtype)


def _stash(stash_type: int) -> None:
    if stash_type != 1:
        raise UnsupportedOpError(f"its stash_type is {stash_type}; 1 (float32) is supported")


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1,
    epsilon: float = 9.999999747378752e-06, stash_type: int = 1,
) -> Tensor:  # fmt: skip
    """Of the dimensions from an axis on."""
    _stash(stash_type)
    over = list(x.shape[axis:])
    if list(scale.shape) == over and (bias is None or list(bias.shape) == over):
        return functional.layer_norm(x, over, scale, bias, epsilon)
    scaled = functional.layer_norm(x, over, None, None, epsilon) * scale
    return scaled if bias is None else scaled + bias


def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 9.999999747378752e-06,
    stash_type: int = 1,
) -> Tensor:  # fmt: skip
    """Of the dimensions from an axis on, by their mean square."""
    _stash(stash_type)
    return functional.rms_norm(x, list(x.shape[axis:]), None, epsilon) * scale


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *,
    epsilon: float = 9.999999747378752e-06, momentum: float = 0.8999999761581421,
) -> Tensor:  # fmt: skip
    """With means that are kept."""
    if len({t.dtype for t in (x, scale, bias, mean, var)}) > 1:
        raise UnsupportedOpError("its inputs are of several dtypes")
    return functional.batch_norm(x, mean, var, scale, bias, training=False, eps=epsilon)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None, group: int = 1, kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Of one to three dimensions."""
    rank = x.dim() - 2
    if rank not in (1, 2, 3) or auto_pad not in ("NOTSET", "VALID"):
        raise UnsupportedOpError(f"it is of {rank} dimensions with auto_pad={auto_pad}")
    if kernel_shape is not None and list(kernel_shape) != list(weight.shape[2:]):
        raise UnsupportedOpError(
            f"its kernel_shape is {list(kernel_shape)}, its weight's {list(weight.shape)}"
        )
    around = list(pads or [0] * (2 * rank)) if auto_pad == "NOTSET" else [0] * (2 * rank)
    first, last = around[:rank], around[rank:]
    if first != last:
        both = [n for pair in zip(first[::-1], last[::-1], strict=True) for n in pair]
        x, first = functional.pad(x, both), [0] * rank
    run: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    ones = [1] * rank
    return run(x, weight, bias, list(strides or ones), first, list(dilations or ones), group)  # type: ignore[no-any-return]


def max_pool(
    x: Tensor, *, kernel_shape: Sequence[int], auto_pad: str = "NOTSET", ceil_mode: int = 0,
    dilations: Sequence[int] | None = None, pads: Sequence[int] | None = None,
    storage_order: int = 0, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The largest value of each window."""
    rank = x.dim() - 2
    around = list(pads or [0] * (2 * rank))
    odd = around[:rank] != around[rank:] or any(
        2 * n > kernel for n, kernel in zip(around, kernel_shape, strict=False)
    )
    if rank not in (1, 2, 3) or auto_pad != "NOTSET" or ceil_mode or storage_order or odd:
        raise UnsupportedOpError(
            f"it is of {rank} dimensions with auto_pad={auto_pad}, ceil_mode={ceil_mode}, pads={around}"
        )
    run: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
    ones = [1] * rank
    return run(x, list(kernel_shape), list(strides or ones), around[:rank], list(dilations or ones))  # type: ignore[no-any-return]


def global_average_pool(x: Tensor) -> Tensor:
    """The mean of all but rows and channels."""
    return x.mean(list(range(2, x.dim())), keepdim=True)


def dropout(x: Tensor, ratio: Any = None, training: Any = None) -> Tensor:
    """Nothing, as it does when a model is not trained."""
    if training not in (None, False):
        raise UnsupportedOpError("its training_mode is not constant and false")
    return x


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: int = 0, scale: float | None = None,
    softcap: float = 0.0, q_num_heads: int | None = None, kv_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0, left_window_size: int = -1, right_window_size: int = -1,
) -> Tensor:  # fmt: skip
    """Of values by heads: softmax of scaled products; where rows of a mask are empty, zero."""
    if {q.dim(), k.dim(), v.dim()} != {4}:
        raise UnsupportedOpError(f"its inputs have {q.dim()} dimensions; 4 are supported")
    if q.shape[1] != k.shape[1] or k.shape[1] != v.shape[1]:
        raise UnsupportedOpError("it has several heads of queries for one of keys")
    if softcap or left_window_size != -1 or right_window_size != -1:
        raise UnsupportedOpError("softcap and windows are not supported")
    if is_causal and mask is not None:
        raise UnsupportedOpError("it has a mask and is_causal=1")
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        raise UnsupportedOpError(f"its mask is of {mask.dtype}")
    if mask is not None and mask.shape[-1] != k.shape[2]:
        raise UnsupportedOpError("its mask is for another number of keys")
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=bool(is_causal), scale=scale
    )


def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int,
    epsilon: float = 9.999999747378752e-06, stash_type: int = 1,
) -> Tensor:  # fmt: skip
    """Of groups of channels, with a scale for each channel."""
    _stash(stash_type)
    if tuple(scale.shape) != (x.shape[1],):
        raise UnsupportedOpError("it has a scale for each group, as before the operator set 21")
    return functional.group_norm(x, num_groups, scale, bias, epsilon)
