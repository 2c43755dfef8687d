"""Plain torch beside each kernel: what it has to return, and what runs where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gascompile.formats.ops import decoded

_CHUNK_VALUES = 1 << 20
"""Values handled at a time, so that temporary copies stay small beside the weight."""


def cast_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``source`` to ``out`` in ``out.dtype``, rounded to nearest."""
    out.copy_(source)


def unpack(packed: torch.Tensor, out: torch.Tensor, *, form: str, group: int) -> None:
    """Write the values of a row-packed weight to ``out`` ``[rows, columns]``, computed in float32."""
    for rows in _chunks(out.shape):
        out[rows] = decoded(packed[rows], form, out.shape[1], group, torch.float32, plain=True)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    form: str | None,
    group: int,
) -> None:
    """Write ``x @ W^T + bias`` to ``out``, with the values of ``W`` and all sums in float32."""
    wide = x.float()
    for rows in _chunks((weight.shape[0], x.shape[1])):
        part = weight[rows]
        values = (
            part.float()
            if form is None
            else decoded(part, form, x.shape[1], group, torch.float32, plain=True)
        )
        added = None if bias is None else bias[rows].float()
        out[:, rows] = torch.nn.functional.linear(wide, values, added).to(out.dtype)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, columns = shape
    step = max(1, _CHUNK_VALUES // max(columns, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
