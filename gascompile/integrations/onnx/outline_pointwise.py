"""Ops on outlines that compute each value of a result from one of each operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gascompile.integrations.onnx.outline import DTYPES, DType, Outline, now, op, promoted
from gascompile.integrations.onnx.outline_views import broadcast_shapes


def laid_out(values: Sequence[Outline], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides that an element-wise kernel gives its result: the operands' order of dimensions."""
    if all(v.shape == shape and v.is_contiguous() for v in values):
        return None
    broadcast = [_broadcast_strides(v, shape) for v in values]
    order = list(reversed(range(len(shape))))
    for first in range(1, len(order)):
        at = first
        for before in reversed(range(first)):
            result = _compared(order[before], order[at], broadcast, shape)
            if result > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif result < 0:
                break
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _compared(a: int, b: int, strides: Sequence[Sequence[int]], shape: Sequence[int]) -> int:
    for stride in strides:
        if stride[a] == 0 or stride[b] == 0:
            continue
        if stride[a] != stride[b]:
            return -1 if stride[a] < stride[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def _broadcast_strides(value: Outline, shape: tuple[int, ...]) -> tuple[int, ...]:
    missing = len(shape) - value.dim()
    own = tuple(
        0 if size == 1 and wanted != 1 else step
        for size, step, wanted in zip(value.shape, value.stride(), shape[missing:], strict=True)
    )
    return (0,) * missing + own


def _elementwise(name: str, *values: Any, dtype: DType | None = None) -> Outline:
    """Run a kernel that computes each value of its result from one of each operand."""
    tensors = [v for v in values if isinstance(v, Outline)]
    shape = broadcast_shapes(*(v.shape for v in tensors))
    # Numbers in memory of the processor have no say in how results lie.
    made = Outline(
        shape, dtype or promoted(values), stride=laid_out([v for v in tensors if v.dim()], shape)
    )
    now().leaf(name, tensors, [made], pointwise=True)
    return made


def _pointwise(name: str, dtype: str | None) -> Callable[..., Outline]:
    """Return the op of a name, whose results are of a dtype, of ``float`` values, or of its operands' dtype."""

    @op(name)
    def run(*values: Any) -> Outline:
        kind = None if dtype in (None, "float") else DTYPES[str(dtype)]
        if dtype == "float" and not promoted(values).is_floating_point:
            kind = DTYPES["float32"]
        return _elementwise(name, *values, dtype=kind)

    return run


_KINDS: Final = {
    None: ("abs", "ceil", "floor", "neg", "relu", "round", "sign", "square", "add", "sub", "mul", "maximum", "minimum",
           "fmod", "remainder", "silu", "hardswish", "softplus"),
    "float": ("cos", "erf", "exp", "log", "reciprocal", "sigmoid", "sin", "sqrt", "tanh", "pow"),
    "bool": ("eq", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan"),
}  # fmt: skip
POINTWISE: Final = {
    name: _pointwise(name, dtype) for dtype, names in _KINDS.items() for name in names
}


@op("div")
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Outline:
    """A quotient; of whole numbers a float unless it is rounded."""
    common = promoted((x, y))
    kind = common if rounding_mode or common.is_floating_point else DTYPES["float32"]
    return _elementwise("div", x, y, dtype=kind)


@op("where")
def where(condition: Outline, x: Any, y: Any) -> Outline:
    """One of two values each."""
    return _elementwise("where", condition, x, y, dtype=promoted((x, y)))


@op("clamp")
def clamp(x: Outline, min: Any = None, max: Any = None) -> Outline:  # noqa: A002 - torch's names
    """Between two limits."""
    return _elementwise("clamp", x, *(v for v in (min, max) if v is not None))


def to(x: Outline, dtype: DType) -> Outline:
    """In another dtype, or itself."""
    if x.dtype != dtype:
        return _to(x, dtype)
    now().skip("to")
    return x


@op("to")
def _to(x: Outline, dtype: DType) -> Outline:
    made = Outline(x.shape, dtype, stride=laid_out([x], x.shape))
    now().leaf("_to_copy", [x], [made])
    return made


def _of_one(name: str, leaf: str) -> Callable[..., Outline]:
    @op(name)
    def run(x: Outline, *options: Any, **named: Any) -> Outline:
        return _elementwise(leaf, x)

    return run


gelu, leaky_relu, elu, nan_to_num = (
    _of_one(name, name) for name in ("gelu", "leaky_relu", "elu", "nan_to_num")
)
