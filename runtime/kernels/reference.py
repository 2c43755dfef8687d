"""Plain torch beside each kernel: what it has to return, and what runs where there is no GPU.

Packing is done here alone: it happens once per weight, on the CPU, before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gascompile.packing import DEFAULT_GROUPS, INT4_LARGEST, INT8_LARGEST, Parts, packed_parts

_CHUNK_VALUES = 1 << 20
"""Values handled at a time, so that temporary copies stay small beside the weight."""


def cast_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``source`` to ``out`` in ``out.dtype``, rounded to nearest."""
    out.copy_(source)


def pack_int8(weight: torch.Tensor, group: int = DEFAULT_GROUPS["int8"]) -> torch.Tensor:
    """Return a matrix as row-packed ``int8``: the scale of ``group`` columns takes the largest of them to 127.

    Scales are rounded to bfloat16 first, and each value to the nearest that they can express.

    Raises:
        ValueError: not a matrix with columns, or a value that is not finite.
    """
    columns = _columns(weight)
    parts = packed_parts("int8", columns, group)
    packed = torch.zeros(weight.shape[0], parts.row_bytes, dtype=torch.uint8, device=weight.device)
    for rows in _chunks(weight.shape):
        values = torch.nn.functional.pad(_finite(weight, rows), (0, -columns % group))
        values = values.unflatten(1, (parts.num_scales, group))
        scales = (values.abs().amax(dim=2, keepdim=True) / INT8_LARGEST).to(torch.bfloat16)
        # Below the smallest normal number a quotient could leave the range of int8.
        scales.masked_fill_(scales < torch.finfo(torch.bfloat16).tiny, 0.0)
        divisor = torch.where(scales == 0, 1.0, scales.float())
        q = (values / divisor).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
        q.masked_fill_(scales == 0, 0.0)
        q = q.flatten(1)[:, :columns].to(torch.int8).contiguous()
        packed[rows, : parts.values_bytes] = q.view(torch.uint8)
        found = scales.view(-1, parts.num_scales).view(torch.uint8)
        packed[rows, parts.scales_offset : parts.used_bytes] = found
    return packed


def pack_int4(weight: torch.Tensor, group: int = DEFAULT_GROUPS["int4"]) -> torch.Tensor:
    """Return a matrix as row-packed ``int4``, with a scale and a minimum per ``group`` columns of a row.

    Scale and minimum are rounded to float16 first, and each value to the nearest that these can express.

    Raises:
        ValueError: not a matrix whose columns the group divides, or a value that is not finite or beyond float16.
    """
    parts = packed_parts("int4", _columns(weight), group)
    packed = torch.zeros(weight.shape[0], parts.row_bytes, dtype=torch.uint8, device=weight.device)
    assert parts.minima_offset is not None
    for rows in _chunks(weight.shape):
        values = _finite(weight, rows).unflatten(1, (parts.num_scales, group))
        least = values.amin(dim=2)
        scales = ((values.amax(dim=2) - least) / INT4_LARGEST).to(torch.float16)
        minima = least.to(torch.float16)
        if values.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(
                "int4 keeps scales and minima as float16, which ends at 65504; the weight holds values from "
                f"{float(values.min())} to {float(values.max())}: keep it as bfloat16 or int8"
            )
        divisor = torch.where(scales == 0, 1.0, scales.float())[:, :, None]
        q = ((values - minima.float()[:, :, None]) / divisor).round_().clamp_(0, INT4_LARGEST)
        q.masked_fill_((scales == 0)[:, :, None], 0.0)
        nibbles = q.to(torch.uint8).flatten(1)
        packed[rows, : parts.values_bytes] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        packed[rows, parts.scales_offset : parts.minima_offset] = scales.view(torch.uint8)
        packed[rows, parts.minima_offset : parts.used_bytes] = minima.view(torch.uint8)
    return packed


def unpack(packed: torch.Tensor, out: torch.Tensor, *, form: str, group: int) -> None:
    """Write the values of a row-packed weight to ``out`` ``[rows, columns]``, computed in float32."""
    parts = packed_parts(form, out.shape[1], group)
    for rows in _chunks(out.shape):
        if form == "int8":
            out[rows] = _int8_values(packed[rows], parts, group)
        else:
            out[rows] = _int4_values(packed[rows], parts, group)


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
        if form is not None:
            values = torch.empty(part.shape[0], x.shape[1], device=x.device)
            unpack(part, values, form=form, group=group)
        else:
            values = part.float()
        added = None if bias is None else bias[rows].float()
        out[:, rows] = torch.nn.functional.linear(wide, values, added).to(out.dtype)


def _int8_values(packed: torch.Tensor, parts: Parts, group: int) -> torch.Tensor:
    scales = packed[:, parts.scales_offset : parts.used_bytes].view(torch.bfloat16).float()
    scales = scales.repeat_interleave(group, dim=1)[:, : parts.values_bytes]
    return packed[:, : parts.values_bytes].view(torch.int8) * scales


def _int4_values(packed: torch.Tensor, parts: Parts, group: int) -> torch.Tensor:
    both = packed[:, : parts.values_bytes]
    q = torch.stack((both & INT4_LARGEST, both >> 4), dim=2).view(-1, parts.num_scales, group)
    scales = packed[:, parts.scales_offset : parts.minima_offset].view(torch.float16).float()
    minima = packed[:, parts.minima_offset : parts.used_bytes].view(torch.float16).float()
    # Exact but for the last addition: four bits times eleven fit into float32.
    return (q * scales[:, :, None] + minima[:, :, None]).flatten(1)


def _columns(weight: torch.Tensor) -> int:
    if weight.dim() != 2:
        raise ValueError(f"only a matrix can be row-packed, not shape {tuple(weight.shape)}")
    return weight.shape[1]


def _finite(weight: torch.Tensor, rows: slice) -> torch.Tensor:
    values = weight[rows].float()
    if not values.isfinite().all():
        raise ValueError(
            f"rows {rows.start} to {rows.stop} of the weight hold values that are not finite; keep it unpacked"
        )
    return values


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, columns = shape
    step = max(1, _CHUNK_VALUES // max(columns, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
