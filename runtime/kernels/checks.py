"""What the kernels may be called with; a kernel that got anything else would read or write elsewhere."""

from __future__ import annotations

import torch

from gascompile.formats.layout import Parts, packed_parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 16
"""Rows of ``x`` in ``linear``; beyond them unpacking once and an ordinary product is the faster way."""
_SCALE_ALIGNMENT = 4  # bytes: two float16 are loaded at once


def check_cast(source: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse what ``cast_copy`` cannot copy.

    Raises:
        TypeError: a dtype that is not known.
        ValueError: shapes, strides or devices that do not fit.
    """
    _check_dtype("source", source)
    _check_out(out, tuple(source.shape))
    _check_device("source", source, out)
    if not (source.is_contiguous() or (source.dim() == 2 and source.stride(1) == 1)):
        raise ValueError(
            f"source has strides {tuple(source.stride())} for shape {tuple(source.shape)}: it has to be contiguous, or "
            "a matrix of contiguous rows; pass it as rows"
        )


def check_unpack(packed: torch.Tensor, out: torch.Tensor, *, form: str, group: int) -> Parts:
    """Refuse what ``unpack`` cannot unpack; return the layout of a row.

    Raises:
        TypeError: a dtype that is not known.
        ValueError: a form, group, shape, stride, alignment or device that does not fit.
    """
    if out.dim() != 2:
        raise ValueError(f"out has shape {tuple(out.shape)}: a packed weight unpacks to a matrix")
    parts = packed_parts(form, max(out.shape[1], 1), group)
    _check_out(out, (packed.shape[0] if packed.dim() else 0, out.shape[1]))
    _check_packed(packed, parts, form, out.shape[1])
    _check_device("packed", packed, out)
    return parts


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    form: str | None,
    group: int,
) -> None:
    """Refuse what ``linear`` cannot multiply.

    Raises:
        TypeError: a dtype that is not known, or a plain weight of another dtype than ``x``.
        ValueError: a form, group, shape, stride, alignment or device that does not fit, or too many rows.
    """
    _check_dtype("x", x)
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] < 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}: it has to be a matrix of contiguous rows"
        )
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(
            f"x has {x.shape[0]} rows, the product takes 1 to {MAX_ROWS}; unpack the weight and multiply as usual"
        )
    if form is None:
        _check_plain(weight, x)
    else:
        _check_packed(weight, packed_parts(form, x.shape[1], group), form, x.shape[1])
    _check_out(out, (x.shape[0], weight.shape[0]))
    _check_device("weight", weight, x)
    _check_device("out", out, x)
    if bias is not None:
        _check_dtype("bias", bias)
        _check_device("bias", bias, x)
        if tuple(bias.shape) != (weight.shape[0],) or not bias.is_contiguous():
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, not ({weight.shape[0]},), or is not contiguous"
            )


def _check_plain(weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.dtype != x.dtype:
        raise TypeError(f"a plain weight of {weight.dtype} does not fit x of {x.dtype}; cast one")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.stride(1) != 1:
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)} and strides {tuple(weight.stride())}: x of {x.shape[1]} "
            f"columns needs [outputs, {x.shape[1]}] with contiguous rows"
        )


def _check_packed(packed: torch.Tensor, parts: Parts, form: str, columns: int) -> None:
    if packed.dtype != torch.uint8:
        raise TypeError(f"a packed weight is torch.uint8, not {packed.dtype}")
    if packed.dim() != 2 or packed.shape[1] != parts.row_bytes or packed.stride(1) != 1:
        raise ValueError(
            f"the packed weight has shape {tuple(packed.shape)} and strides {tuple(packed.stride())}: {columns} "
            f"columns as {form} need [rows, {parts.row_bytes}] with contiguous rows"
        )
    stride = packed.stride(0)
    if packed.data_ptr() % _SCALE_ALIGNMENT or stride % _SCALE_ALIGNMENT:
        raise ValueError(
            f"the packed weight starts at address {packed.data_ptr()} with rows {stride} bytes apart: its scales need "
            f"multiples of {_SCALE_ALIGNMENT}; land it at such an address"
        )


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} is {tensor.dtype}; the kernels know {known}")


def _check_out(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    _check_dtype("out", out)
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {tuple(out.stride())}: it has to be contiguous and of shape "
            f"{shape}"
        )


def _check_device(name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {other.device}")
