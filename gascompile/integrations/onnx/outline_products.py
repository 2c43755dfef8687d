"""Products of outlines: layers, matrices, convolutions and attention, with the kernels of torch's processor code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gascompile.integrations.onnx.outline import DTYPES, Outline, now, op, refuse
from gascompile.integrations.onnx.outline_views import (
    broadcast_shapes,
    expand,
    fresh,
    permute,
    reshape,
    t,
    unsqueeze,
)

_NUM_DIMS = 4
"""Of queries, keys, values and masks: rows, heads, tokens, width."""


def _require_inner(left: int, right: int) -> None:
    if left != right:
        raise ValueError(f"matrices of {left} columns and {right} rows cannot be multiplied")


def _mm(x: Outline, y: Outline) -> Outline:
    _require_inner(x.shape[1], y.shape[0])
    made = fresh(x, (x.shape[0], y.shape[1]))
    now().leaf("mm", [x, y], [made], flops=2 * x.numel() * y.shape[1])
    return made


def _bmm(x: Outline, y: Outline) -> Outline:
    _require_inner(x.shape[2], y.shape[1])
    made = fresh(x, (*x.shape[:2], y.shape[2]))
    now().leaf("bmm", [x, y], [made], flops=2 * x.numel() * y.shape[2])
    return made


@op("addmm")
def addmm(bias: Outline, x: Outline, y: Outline) -> Outline:
    """A product and what is added to each of its rows."""
    _require_inner(x.shape[1], y.shape[0])
    made = fresh(x, (x.shape[0], y.shape[1]))
    now().leaf("addmm", [bias, x, y], [made], flops=2 * x.numel() * y.shape[1])
    return made


@op("linear")
def linear(x: Outline, weight: Outline, bias: Outline | None = None) -> Outline:
    """A product with a transposed matrix, and what is added to it."""
    shape = (*x.shape[:-1], weight.shape[0])
    if bias is None:
        return matmul(x, t(weight))
    if x.dim() == 2:
        return addmm(bias, x, t(weight))
    if x.dim() == 1 or x.is_contiguous():
        rows = reshape(x, [-1, x.shape[-1]])
        return reshape(addmm(bias, rows, t(weight)), shape)
    product = matmul(x, t(weight))
    made = fresh(x, shape)
    now().leaf("add.Tensor", [product, bias], [made], pointwise=True)
    return made


@op("matmul")
def matmul(x: Outline, y: Outline) -> Outline:
    """A product of matrices, of several of them, or of vectors."""
    if x.dtype != y.dtype:
        raise ValueError(f"a product of {x.dtype} and {y.dtype}")
    if x.dim() < 2 or y.dim() < 2:
        return _with_vectors(x, y)
    if x.dim() == 2 and y.dim() == 2:
        return _mm(x, y)
    if y.dim() == 2 and _lies_by_rows(x):
        rows = reshape(x, [-1, x.shape[-1]])
        return reshape(_mm(rows, y), [*x.shape[:-1], y.shape[1]])
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    many = math.prod(batch)
    left = reshape(expand(x, (*batch, *x.shape[-2:])), (many, *x.shape[-2:]))
    right = reshape(expand(y, (*batch, *y.shape[-2:])), (many, *y.shape[-2:]))
    return reshape(_bmm(left, right), (*batch, x.shape[-2], y.shape[-1]))


def _lies_by_rows(x: Outline) -> bool:
    """Return whether all but the last dimension can be seen as one."""
    steps = zip(x.stride()[:-2], x.stride()[1:-1], x.shape[1:-1], strict=True)
    return not x.numel() or all(outer == inner * size for outer, inner, size in steps)


def _with_vectors(x: Outline, y: Outline) -> Outline:
    if x.dim() == 0 or y.dim() == 0:
        raise ValueError("a product with a number")
    left = unsqueeze(x, 0) if x.dim() == 1 else x
    right = unsqueeze(y, 1) if y.dim() == 1 else y
    product = matmul(left, right)
    if x.dim() == 1 and y.dim() == 2:
        now().leaf("squeeze_", [product], [product])
    shape = list(product.shape)
    if y.dim() == 1:
        del shape[-1]
    if x.dim() == 1:
        del shape[-1 if y.dim() == 1 else -2]
    return reshape(product, shape)


@op("einsum")
def einsum(equation: str, *values: Outline) -> Outline:
    """Sums of products of two tensors by letters, as one product of many matrices."""
    sides = equation.replace(" ", "").split("->")
    terms = sides[0].split(",")
    letters = [len(set(term)) == len(term) and term.isalpha() for term in terms]
    if len(values) != 2 or len(terms) != 2 or len(sides) != 2 or not all(letters):
        raise refuse(f"it computes {equation!r}")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, size in zip(term, value.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"sizes of {letter!r} differ")
    result = sides[1]
    shared = [c for c in terms[0] if c in terms[1] and c in result]
    summed = [c for c in terms[0] if c in terms[1] and c not in result]
    left = [c for c in terms[0] if c not in terms[1]]
    right = [c for c in terms[1] if c not in terms[0]]
    if set(result) != {*shared, *left, *right}:
        raise refuse(f"it computes {equation!r}")

    def matrix(
        at: int, order: Sequence[str], rows: Sequence[str], columns: Sequence[str]
    ) -> Outline:
        turned = permute(values[at], [terms[at].index(c) for c in order])
        return reshape(turned, [math.prod(sizes[c] for c in p) for p in (shared, rows, columns)])

    product = _bmm(
        matrix(0, [*shared, *left, *summed], left, summed),
        matrix(1, [*shared, *summed, *right], summed, right),
    )
    order = [*shared, *left, *right]
    whole = reshape(product, [sizes[c] for c in order])
    return permute(whole, [order.index(c) for c in result])


def _convolution(rank: int) -> Callable[..., Outline]:
    @op(f"conv{rank}d")
    def run(
        x: Outline,
        weight: Outline,
        bias: Outline | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Outline:
        if x.shape[1] != weight.shape[1] * groups or x.dtype != weight.dtype:
            raise ValueError(
                f"{x.shape[1]} channels of {x.dtype}, and a weight of {list(weight.shape)}"
            )
        spatial = [
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, pad, gap, kernel, step in zip(
                x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
            )
        ]
        made = fresh(x, (x.shape[0], weight.shape[0], *spatial))
        given = [x, weight] if bias is None else [x, weight, bias]
        args = (x, weight, bias, stride, padding, dilation, False, [0] * rank, groups)
        flops = 2 * made.numel() * math.prod(weight.shape[1:])
        now().leaf("convolution", given, [made], flops=flops, args=args)
        return made

    return run


conv1d, conv2d, conv3d = _convolution(1), _convolution(2), _convolution(3)


def scaled_dot_product_attention(
    query: Outline,
    key: Outline,
    value: Outline,
    attn_mask: Outline | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Outline:
    """Attention of values by heads; those that are repeated for groups of queries are read where they are."""
    keys, values = _repeated(key), _repeated(value)
    fits = (
        now().groups_attention
        and keys is not None
        and values is not None
        and query.is_floating_point()
        and query.dtype == keys.dtype == values.dtype
        and (attn_mask is None or attn_mask.dim() == _NUM_DIMS)
        and key.shape[1] == value.shape[1] == query.shape[1]
        and keys.shape[1] == values.shape[1]
        and query.shape[-1] == keys.shape[-1] == values.shape[-1]
        and all(v.stride()[-1] == 1 for v in (query, keys, values))
    )
    if fits and keys is not None and values is not None:
        key, value = keys, values
    return _attention(query, key, value, attn_mask)


def _repeated(whole: Outline) -> Outline | None:
    """Return what ``x[:, :, None].expand(...).reshape(...)`` repeats head after head; see ``grouped_attention``."""
    expanded = _source(whole, "reshape")
    unsqueezed = _source(expanded, "expand")
    source = _source(unsqueezed, "unsqueeze")
    if expanded is None or unsqueezed is None or source is None or source.dim() != _NUM_DIMS:
        return None
    rows, heads, tokens, width = source.shape
    each = expanded.shape[2]
    is_repeated = unsqueezed.shape == (rows, heads, 1, tokens, width)
    is_repeated = is_repeated and expanded.shape == (rows, heads, each, tokens, width)
    is_repeated = is_repeated and whole.shape == (rows, heads * each, tokens, width)
    return source if is_repeated else None


def _source(value: Outline | None, made_by: str) -> Outline | None:
    return value.source if value is not None and value.made_by == made_by else None


@op("scaled_dot_product_attention")
def _attention(query: Outline, key: Outline, value: Outline, attn_mask: Outline | None) -> Outline:
    from gascompile.integrations.onnx import outline_ops as ops

    mask = attn_mask
    if mask is not None and mask.dtype.name == "bool":
        mask = ops.where(mask, *(ops.full((), 0.0, dtype=query.dtype) for _ in range(2)))
    given = [query, key, value, *([mask] if mask is not None else [])]
    if query.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise refuse(f"it has heads of {query.shape[-1]} and {value.shape[-1]} values")
    batch, heads, rows, _ = query.shape
    made = Outline(query.shape, query.dtype, stride=_by_rows(query.shape))
    sums = Outline((batch, heads, rows), DTYPES["float32"])
    flops = 4 * query.numel() * key.shape[-2]
    name = "_scaled_dot_product_flash_attention_for_cpu"
    now().leaf(name, given, [made, sums], flops=flops)
    return made


def _by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of results that lie by rows, and by heads within one."""
    _, heads, rows, size = shape
    return (rows * heads * size, size, heads * size, 1)
