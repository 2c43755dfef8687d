"""Weights into their wire forms: rounded once, with the error that this makes. The twin of ``wire_ops.decoded``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gascompile.packing import INT4_LARGEST, INT8_LARGEST, packed_parts
from gascompile.wire_ops import decoded

_SHRINK = (1.0, 0.9, 0.8)
_SHRINK_INT8 = (1.0, 0.99, 0.98, 0.965)
"""Shares of a group's range that are tried: cutting the farthest values off may make the others finer."""
_FIT_TURNS = 2
_LEAST_SCALE = 1e-7
"""Above float16's smallest subnormal: groups of one value keep a scale that can be divided by."""
_CHUNK_VALUES = 1 << 18
"""Values that are searched at once: caches hold them from one step of the search to the next."""


def pack(weight: torch.Tensor, form: str, group: int) -> torch.Tensor:
    """Return ``weight``, ``[rows, columns]`` of any floating dtype, in its wire form.

    Scales, and minima of ``int4``, are searched for the least squared error of each group.

    Raises:
        ValueError: a value is not finite, or out of the range of the form's float16 scales.
    """
    if form in ("bfloat16", "float16", "float32"):
        return weight.to(getattr(torch, form))
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    return torch.cat([_packed(rows.float(), form, group) for rows in weight.split(step)])


def squared_error(
    weight: torch.Tensor, wire: torch.Tensor, form: str, group: int
) -> tuple[float, float]:
    """Return the sum of squares of ``decoded(wire) - weight``, and that of ``weight``."""
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    wrong = total = 0.0
    for rows, packed in zip(weight.split(step), wire.split(step), strict=True):
        exact = rows.double()
        found = decoded(packed, form, weight.shape[1], group, torch.float32)
        wrong += float((found.double() - exact).square().sum())
        total += float(exact.square().sum())
    return wrong, total


def _packed(rows: torch.Tensor, form: str, group: int) -> torch.Tensor:
    if not torch.isfinite(rows).all():
        raise ValueError(f"{form} holds finite values only, and some are infinite or not a number")
    num_rows, columns = rows.shape
    parts = packed_parts(form, columns, group)
    out = torch.zeros((num_rows, parts.row_bytes), dtype=torch.uint8)
    if form == "int8":
        values, scales = _search_int8(rows, group)
        out[:, :columns] = values.view(torch.uint8)
        out[:, parts.scales_offset : parts.used_bytes] = scales.view(torch.uint8)
        return out
    values, scales, minima = _search(rows.reshape(-1, group))
    pairs = values.view(num_rows, columns // 2, 2)
    assert parts.minima_offset is not None, "int4 has minima"
    out[:, : columns // 2] = pairs[..., 0] | (pairs[..., 1] << 4)
    out[:, parts.scales_offset : parts.minima_offset] = scales.view(num_rows, -1).view(torch.uint8)
    out[:, parts.minima_offset : parts.used_bytes] = minima.view(num_rows, -1).view(torch.uint8)
    return out


def _search_int8(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of ``rows`` and the scales of their groups that leave the least squared error found."""
    num_rows, columns = rows.shape
    groups = torch.nn.functional.pad(rows, (0, -columns % group)).view(num_rows, -1, group)
    largest = groups.abs().amax(2, keepdim=True) / INT8_LARGEST
    best_error = torch.full_like(largest, torch.inf)
    best_values, best_scales = torch.zeros_like(groups), torch.zeros_like(largest)
    for share in _SHRINK_INT8:
        scales = (largest * share).to(torch.bfloat16).float()
        # A subnormal scale could take its quotients out of every range.
        scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
        values = (groups / scales).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
        error = (values * scales).sub_(groups).square_().sum(2, keepdim=True)
        # Squares of the largest float32 values are infinite; the first scale serves then.
        better = (error < best_error) | (best_scales == 0)
        best_error = torch.where(better, error, best_error)
        best_scales = torch.where(better, scales, best_scales)
        torch.where(better, values, best_values, out=best_values)
    values = best_values.view(num_rows, -1)[:, :columns].to(torch.int8)
    return values.contiguous(), best_scales.view(num_rows, -1).to(torch.bfloat16)


def _search(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, scales and minima of ``groups``, ``[n, group]``, that leave the least squared error found.

    For each share of the range: round, fit scale and minimum to the rounded values by least squares, again.
    """
    best_error: torch.Tensor | None = None
    best: tuple[torch.Tensor, ...] = ()
    for scale, minimum in _candidates(groups):
        half = scale.half(), minimum.half()
        if not all(torch.isfinite(part).all() for part in half):
            raise ValueError(
                f"int4 keeps scales in float16, and weights reach {groups.abs().max():.3g}"
            )
        values = _rounded(groups, half[0].float(), half[1].float())
        error = values * half[0] + half[1]
        error = error.sub_(groups).square_().sum(1, keepdim=True)
        found = values.to(torch.uint8), *half
        if best_error is None:
            best_error, best = error, found
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
    values, scales, minima = best
    return values, scales, minima


def _candidates(groups: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    mean = groups.mean(1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    for share in _SHRINK:
        minimum = middle - share * reach
        scale = (2 * share / INT4_LARGEST * reach).clamp_min(_LEAST_SCALE)
        if share == 1.0:
            yield scale, minimum
        for _ in range(_FIT_TURNS):
            values = _rounded(groups, scale, minimum)
            centre = values.mean(1, keepdim=True)
            values -= centre
            spread = values.square().sum(1, keepdim=True)
            fitted = (values * (groups - mean)).sum(1, keepdim=True) / spread.clamp_min(1e-6)
            scale = torch.where(spread > 0, fitted, scale).clamp_min(_LEAST_SCALE)
            minimum = mean - scale * centre
        yield scale, minimum


def _rounded(groups: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return ((groups - minimum) / scale).round_().clamp_(0, INT4_LARGEST)
