"""Optimizer states in 8 bits: a code per value, and a power of two per block of 256 that its values lie below.

Codes are finest for the largest values of a block: over its first four octaves a value is off by at most 1/32 of
itself, over the next four by 1/16, and so on, as far as 28 octaves down. This is how bitsandbytes' dynamic code is
spaced, too. Here it follows from the bits of float32: shifted right by two they make a number that grows about as the
fourth root, which is rounded to a whole one. No tables and no searches; the same bits come out on every device.

- ``SIGNED`` (means, momenta): a sign and 7 bits, rounded to the nearest.
- ``UNSIGNED`` (means of squares): 8 bits, twice as fine. Rounded by a dither that differs from step to step, so that
  an average that changes by a thousandth per step follows; rounded to the nearest it would stay where it is. What
  is not zero does not become zero: an update divides by it.

Decoding and coding again changes nothing. A block with a value that is not finite, or 8.5e37 or more, has no finite
value afterwards; one whose values are all below 1.2e-38 becomes zeros.

Coded values lie as ``[blocks * 256]`` codes and then ``[blocks]`` scales, all bytes. All zeros are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256
"""Values that share a scale."""
OCTAVE = 23
"""Bits of float32 below its exponent."""
MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign
LARGEST_SCALE = 253
"""Of the scales that are not ``NOT_FINITE``: what values are multiplied by is still a normal number."""
NOT_FINITE = 255  # the code of a scale of infinities and NaN
DITHERS = 1 << 16
"""After so many values the dither begins anew."""
DITHER_BITS = 19  # of one dither
GOLDEN = 0x9E3779B1
"""2 ** 32 over the golden ratio: its multiples spread evenly, however many there are."""
_ONE = 0x3F800000  # 1.0 as the bits of a float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """How values become codes."""

    signed: bool
    bits: int
    """Without the sign."""

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def offset(self) -> int:
        """What makes ``2 ** bits`` of the bits of 1, shifted right by two."""
        return _ONE - (_ONE >> 2) + (self.bits << OCTAVE)


SIGNED = Code(signed=True, bits=7)
UNSIGNED = Code(signed=False, bits=8)


def num_blocks(num_values: int) -> int:
    """Return how many blocks values take, the last one in part."""
    return -(-num_values // BLOCK)


def coded_bytes(num_values: int) -> int:
    """Return how many bytes ``num_values`` take."""
    return num_blocks(num_values) * (BLOCK + 1)


def parts(coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes ``[blocks, 256]`` and the scales ``[blocks]`` as views of all coded bytes."""
    blocks = coded.numel() // (BLOCK + 1)
    return coded[: blocks * BLOCK].view(blocks, BLOCK), coded[blocks * BLOCK :]


def dither_shift(step: int) -> int:
    """Return what the dither of the ``step``-th update is shifted by, cyclically."""
    return (step * GOLDEN & 0xFFFFFFFF) >> (32 - DITHER_BITS)


def dither(step: int, count: int = DITHERS, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return what is added before codes are cut off, float32 ``[count]`` from 0 to 1, for the ``step``-th update.

    Element ``i`` of a state takes the ``i % DITHERS``-th.
    """
    place = torch.arange(count, dtype=torch.int32, device=device)
    # As a multiplication in 32 bits wraps.
    place.mul_(GOLDEN - (1 << 32)).bitwise_right_shift_(32 - DITHER_BITS)
    place.add_(dither_shift(step)).bitwise_and_((1 << DITHER_BITS) - 1)
    return place.to(torch.float32).mul_(2.0**-DITHER_BITS)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, code: Code
) -> None:
    """Write the values of some blocks.

    Args:
        codes: uint8 ``[blocks, 256]``.
        scales: uint8 ``[blocks]``.
        out: contiguous float32 ``[blocks, 256]``.
        scratch: int32 of the same shape, whose values are lost; only ``SIGNED`` needs it.
        code: that the values are in.
    """
    bits = out.view(torch.int32)
    if code.signed:
        out.copy_(codes.view(torch.int8))
        torch.bitwise_and(bits, ~MAGNITUDE, out=scratch)
        bits.bitwise_and_(MAGNITUDE)
    else:
        out.copy_(codes)
    bits.clamp_(min=code.offset).sub_(code.offset).bitwise_left_shift_(2)
    out.mul_((scales.to(torch.int32) << OCTAVE).view(torch.float32)[:, None])
    if code.signed:
        bits.bitwise_or_(scratch)


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    code: Code,
    added: torch.Tensor | None = None,
) -> None:
    """Write the codes of some blocks; ``values`` are used up.

    Args:
        values: contiguous float32 ``[blocks, 256]``; not negative for ``UNSIGNED``.
        codes: uint8 ``[blocks, 256]`` to write to.
        scales: uint8 ``[blocks]`` to write to.
        code: to write.
        added: what ``dither`` returns, as many values as ``values`` has; rounds to the nearest where missing.
    """
    bits = values.view(torch.int32)
    mark = torch.lt(values, 0) if code.signed else torch.gt(values, 0)
    scale = _scales(values.abs_().amax(dim=1, keepdim=True))
    scales.copy_(scale[:, 0])
    values.mul_(((NOT_FINITE - 1 - scale) << OCTAVE).view(torch.float32))
    bits.bitwise_right_shift_(2).add_(code.offset)
    if added is None:
        values.add_(0.5)
    else:
        values.add_(added.view_as(values))
    codes.copy_(values.clamp_(max=code.largest))
    if code.signed:
        sign = mark.view(torch.int8)
        codes.view(torch.int8).mul_(sign.mul_(-2).add_(1))
    else:
        torch.maximum(codes, mark.view(torch.uint8), out=codes)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Return each block's scale, int32: exponents of float32 that all values lie below."""
    scales = largest.view(torch.int32).bitwise_right_shift_(OCTAVE)
    scales.add_(scales > 0)
    return scales.masked_fill_(scales > LARGEST_SCALE, NOT_FINITE)


def coded(values: torch.Tensor, code: Code) -> torch.Tensor:
    """Return all bytes of a float32 vector, each value rounded to the nearest."""
    out = torch.empty(coded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    padded = values.new_zeros(num_blocks(values.numel()), BLOCK)
    padded.view(-1)[: values.numel()] = values
    encode(padded, *parts(out), code)
    return out


def decoded(coded_values: torch.Tensor, num_values: int, code: Code) -> torch.Tensor:
    """Return the ``num_values`` float32 values of coded bytes."""
    codes, scales = parts(coded_values)
    out = torch.empty(codes.shape, dtype=torch.float32, device=coded_values.device)
    decode(codes, scales, out, torch.empty_like(codes, dtype=torch.int32), code)
    return out.view(-1)[:num_values]
