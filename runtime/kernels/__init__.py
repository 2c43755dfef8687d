"""What arrives in another form than it is computed in: casts, unpacking, products with packed weights.

Each function takes tensors of one device. On a GPU it launches a Triton kernel on the current stream, which
is not waited for; in CPU memory it calls the plain torch code of ``reference``, which says what every kernel
must return. Triton is imported at the first launch, so that this package can be imported without it.
"""

from __future__ import annotations

import torch

from gascompile.formats.layout import DEFAULT_GROUPS
from gascompile.runtime.kernels import checks, reference

MAX_ROWS = checks.MAX_ROWS

__all__ = ["MAX_ROWS", "cast_copy", "linear", "unpack"]


def cast_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``source``, rounded to nearest in ``out.dtype``, to ``out``.

    Args:
        source: bfloat16, float16 or float32; contiguous, or a matrix whose rows are (any distance apart).
        out: contiguous, of the same shape and device; bfloat16, float16 or float32. It must not overlap ``source``.

    Raises:
        TypeError: a dtype that is none of the three.
        ValueError: shapes, strides or devices that do not fit.
    """
    checks.check_cast(source, out)
    if out.numel() == 0:
        return
    if source.is_cuda:
        from gascompile.runtime.kernels.cast import cast_copy as launch

        launch(source, out)
    else:
        reference.cast_copy(source, out)


def unpack(packed: torch.Tensor, out: torch.Tensor, *, form: str, group: int | None = None) -> None:
    """Write the values of a row-packed weight to ``out``.

    Args:
        packed: uint8 of ``[rows, row_bytes]`` as ``formats.layout`` lays rows out; rows may be further apart.
        out: contiguous ``[rows, columns]`` of bfloat16, float16 or float32 on the same device.
        form: ``int8`` or ``int4``.
        group: columns that share a scale; those of ``DEFAULT_GROUPS`` where missing.

    Raises:
        TypeError: a dtype that is none of these.
        ValueError: a form, group, shape, stride, alignment or device that does not fit.
    """
    group = _group(form, group)
    checks.check_unpack(packed, out, form=form, group=group)
    if out.numel() == 0:
        return
    if packed.is_cuda:
        from gascompile.runtime.kernels.dequantise import unpack as launch

        launch(packed, out, form=form, group=group)
    else:
        reference.unpack(packed, out, form=form, group=group)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    form: str | None = None,
    group: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ W^T + bias`` for few rows of ``x``, reading a weight of another form once, as it lies.

    Sums are float32. Of an ``int4`` weight's values at least 11 bits are multiplied, all 24 with a single row.

    Args:
        x: ``[1..MAX_ROWS, columns]`` of bfloat16, float16 or float32; its rows may be any distance apart.
        weight: the packed weight, or ``[outputs, columns]`` of ``x.dtype`` where ``form`` is ``None``.
        bias: ``[outputs]``, any of the three dtypes.
        form: ``int8``, ``int4``, or ``None`` for a plain weight.
        group: columns that share a scale; those of ``DEFAULT_GROUPS`` where missing.
        out: contiguous ``[rows, outputs]`` to write to; made in ``x.dtype`` where missing.

    Raises:
        TypeError: a dtype that is none of these.
        ValueError: a form, group, shape, stride, alignment or device that does not fit; more than ``MAX_ROWS`` rows.
    """
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    group = _group(form, group)
    checks.check_linear(x, weight, bias, out, form=form, group=group)
    if out.numel() == 0:
        return out
    if x.is_cuda:
        from gascompile.runtime.kernels.product import linear as launch

        launch(x, weight, bias, out, form=form, group=group)
    else:
        reference.linear(x, weight, bias, out, form=form, group=group)
    return out


def _group(form: str | None, group: int | None) -> int:
    return DEFAULT_GROUPS.get(form or "", 0) if group is None else group
