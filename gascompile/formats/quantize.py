"""Weights into their transfer formats: rounded once, with the error this makes; twin of ``formats.ops.decoded``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gascompile.formats.layout import (
    GROUPS_PER_STEP,
    INT4_LARGEST,
    LARGEST_CODE,
    LOW_BITS,
    Parts,
    largest_value,
    packed_parts,
    row_bytes,
)
from gascompile.formats.ops import decoded

_SHRINK = (1.0, 0.9, 0.8)
"""Shares of a group's range that are tried: cutting the farthest values off may make the others finer."""
_SHRINK_SIGNED = (1.0, 0.96)
"""Scales are codes of four bits: a little less than needed is the next lower code, and others are hardly better."""
_FIT_TURNS = 2  # of rounding and of fitting scales to it
_LEAST_SCALE = 1e-7
"""Above float16's smallest subnormal: groups of one value keep a scale that can be divided by."""
_ABOVE = 1 + 2.0**-8
"""Times a step before it is rounded to bfloat16: it then reaches the largest value."""
_CHUNK_VALUES = 1 << 18
"""Values that are searched at once: caches hold them from one step of the search to the next."""


def pack(weight: torch.Tensor, form: str, group: int) -> torch.Tensor:
    """Return ``weight``, ``[rows, columns]`` of any floating dtype, in its transfer format.

    Scales, and minima of ``int4``, are searched for the least squared error of each group.

    Raises:
        ValueError: a value is not finite, or out of the range of the form's float16 scales.
    """
    if form in ("bfloat16", "float16", "float32"):
        return weight.to(getattr(torch, form))
    if not weight.shape[0]:
        return torch.empty((0, row_bytes(form, weight.shape[1], group)), dtype=torch.uint8)
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
        values = decoded(packed, form, weight.shape[1], group, torch.float32)
        wrong += float((values.double() - exact).square().sum())
        total += float(exact.square().sum())
    return wrong, total


def _packed(rows: torch.Tensor, form: str, group: int) -> torch.Tensor:
    if not torch.isfinite(rows).all():
        raise ValueError(f"{form} holds finite values only, and some are infinite or not a number")
    num_rows, columns = rows.shape
    parts = packed_parts(form, columns, group)
    out = torch.zeros((num_rows, parts.row_bytes), dtype=torch.uint8)
    if form != "int4":
        values, codes, steps = _search_signed(rows, group, largest_value(form))
        _write_signed(out, values, parts, LOW_BITS[form])
        pairs = torch.nn.functional.pad(codes, (0, parts.num_scales % 2)).unflatten(1, (-1, 2))
        scales_end = parts.scales_offset + pairs.shape[1]
        out[:, parts.scales_offset : scales_end] = pairs[..., 0] | (pairs[..., 1] << 4)
        out[:, parts.steps_offset : parts.used_bytes] = steps.view(torch.uint8)
        return out
    values, scales, minima = _search(rows.reshape(-1, group))
    pairs = values.view(num_rows, columns // 2, 2)
    assert parts.minima_offset is not None, "int4 has minima"
    out[:, : columns // 2] = pairs[..., 0] | (pairs[..., 1] << 4)
    out[:, parts.scales_offset : parts.minima_offset] = scales.view(num_rows, -1).view(torch.uint8)
    out[:, parts.minima_offset : parts.used_bytes] = minima.view(num_rows, -1).view(torch.uint8)
    return out


def _search_signed(
    rows: torch.Tensor, group: int, largest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values of ``rows``, the codes of their groups and the steps of the least squared error found."""
    num_rows, columns = rows.shape
    groups = torch.nn.functional.pad(rows, (0, -columns % group)).view(num_rows, -1, group)
    needed = groups.abs().amax(2, keepdim=True).div_(largest)
    steps, step = _steps(needed.squeeze(2), largest)
    divisor = torch.where(step == 0, 1.0, step)
    best_error = torch.full_like(needed, torch.inf)
    best_values, best_codes = torch.zeros_like(groups), torch.zeros_like(needed)
    for share in _SHRINK_SIGNED:
        codes = (needed * share / divisor).ceil_().clamp_(1, LARGEST_CODE)
        scales = codes * step
        values = groups / torch.where(scales == 0, 1.0, scales)
        values = values.round_().clamp_(-largest, largest).mul_(step != 0)
        error = (values * scales).sub_(groups).square_().sum(2, keepdim=True)
        # Squares of the largest float32 values are infinite; the first scale serves then.
        better = (error < best_error) | (best_codes == 0)
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better, codes, best_codes)
        torch.where(better, values, best_values, out=best_values)
    values = best_values.view(num_rows, -1)[:, :columns].to(torch.int16)
    return values, best_codes.squeeze(2).to(torch.uint8), steps


def _steps(needed: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bfloat16 steps of rows of groups that need such scales, and for each group its own in float32."""
    num_groups = needed.shape[1]
    padded = torch.nn.functional.pad(needed, (0, -num_groups % GROUPS_PER_STEP))
    steps = padded.unflatten(1, (-1, GROUPS_PER_STEP)).amax(2).mul_(_ABOVE / LARGEST_CODE)
    steps.clamp_max_(torch.finfo(torch.float32).max / (LARGEST_CODE * largest) / _ABOVE)
    # Quotients by a subnormal step could leave every range.
    steps.masked_fill_(steps < torch.finfo(torch.float32).tiny, 0.0)
    rounded = steps.to(torch.bfloat16)
    of_groups = rounded.float().repeat_interleave(GROUPS_PER_STEP, 1)[:, :num_groups, None]
    return rounded, of_groups


def _write_signed(out: torch.Tensor, values: torch.Tensor, parts: Parts, low_bits: int) -> None:
    """Write the upper eight bits of ``values`` into the rows of ``out``, then the lower ones in planes."""
    columns = values.shape[1]
    out[:, :columns] = (values >> low_bits).to(torch.int8).view(torch.uint8)
    if not low_bits:
        return
    low = (values & ((1 << low_bits) - 1)).to(torch.uint8)
    plane = out[:, columns : columns + parts.low_bytes]
    for place, begin in enumerate(range(0, columns, parts.low_bytes)):
        piece = low[:, begin : begin + parts.low_bytes]
        plane[:, : piece.shape[1]] |= piece << (place * low_bits)


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
        candidate = values.to(torch.uint8), *half
        if best_error is None:
            best_error, best = error, candidate
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = tuple(
            torch.where(better, new, old) for new, old in zip(candidate, best, strict=True)
        )
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
