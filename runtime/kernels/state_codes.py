"""Optimizer states in 8 bits: a code per value, and a base per block of 256.

A block's base is a power of two ``c`` that lies 8 or 16 octaves below what its largest value reaches. A code counts the
steps, 16 to an octave, from ``c`` to ``c + |value|``: near zero steps are even, above they grow with the value.
Coding is thus arithmetic on the bits of float32, without tables or searches.

- ``SIGNED`` (means, momenta): a sign and 7 bits, rounded to the nearest. Off by at most 1/32 of the value and 1/2048
  of the block's largest.
- ``UNSIGNED`` (means of squares): 8 bits. Rounded by a dither that differs from step to step, so that an average
  that changes by a thousandth per step follows, which it does not where a step of the code is larger than that and
  rounding goes to the nearest. Off by at most 1/16 of the value and 1/2 ** 18 of the largest. What is not zero does not
  become zero: an update divides by it.

Decoding and coding again changes nothing. Infinities and NaN stay where they are; the rest of their block is lost.
Values have to be less than 3.3e38.

Coded values lie as ``[blocks * 256]`` codes and then ``[blocks]`` bases, all bytes. All zeros are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256
"""Values that share a base."""
SHIFT = 19
"""Bits of float32 below a step: 16 steps to an octave."""
EXPONENT = 0x7F800000
_EXPONENT_SHIFT = 23
DITHERS = 1 << 16
"""After so many values the dither begins anew."""
GOLDEN = 0x9E3779B1
"""2 ** 32 over the golden ratio: its multiples spread evenly, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """How values become codes."""

    octaves: int
    """From the base to the largest value's own octave."""
    signed: bool

    @property
    def largest(self) -> int:
        """The largest code, without the sign."""
        return ((self.octaves + 1) << (_EXPONENT_SHIFT - SHIFT)) - 1

    @property
    def span(self) -> int:
        """The octaves, in bits of float32."""
        return self.octaves << _EXPONENT_SHIFT

    @property
    def margin(self) -> int:
        """What added to the largest value's bits tells the octave that it reaches with the base added to it."""
        return 1 << (_EXPONENT_SHIFT + 1 - self.octaves)


SIGNED = Code(octaves=7, signed=True)
UNSIGNED = Code(octaves=15, signed=False)


def num_blocks(num_values: int) -> int:
    """Return how many blocks values take, the last one in part."""
    return -(-num_values // BLOCK)


def coded_bytes(num_values: int) -> int:
    """Return how many bytes ``num_values`` take."""
    return num_blocks(num_values) * (BLOCK + 1)


def parts(coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes ``[blocks, 256]`` and the bases ``[blocks]`` as views of all coded bytes."""
    blocks = coded.numel() // (BLOCK + 1)
    return coded[: blocks * BLOCK].view(blocks, BLOCK), coded[blocks * BLOCK :]


def dither_shift(step: int) -> int:
    """Return what the dither of the ``step``-th update is shifted by, cyclically."""
    return (step * GOLDEN & 0xFFFFFFFF) >> (32 - SHIFT)


def dither(step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return what is added below a step of the code, int32 ``[DITHERS]``, for the ``step``-th update."""
    place = torch.arange(DITHERS, dtype=torch.int32, device=device)
    # As a multiplication in 32 bits wraps.
    spread = place * (GOLDEN - (1 << 32))
    own = (spread >> (32 - SHIFT)).add_(dither_shift(step))
    return own.bitwise_and_((1 << SHIFT) - 1)


def decode(
    codes: torch.Tensor, bases: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, code: Code
) -> None:
    """Write the values of some blocks.

    Args:
        codes: uint8 ``[blocks, 256]``.
        bases: uint8 ``[blocks]``.
        out: contiguous float32 ``[blocks, 256]``.
        scratch: int32 of the same shape, whose values are lost; only ``SIGNED`` needs it.
        code: that the values are in.
    """
    bits = out.view(torch.int32)
    base = (bases.to(torch.int32) << _EXPONENT_SHIFT)[:, None]
    if code.signed:
        bits.copy_(codes.view(torch.int8))
        torch.bitwise_and(bits, -(1 << 31), out=scratch)
        bits.bitwise_and_(code.largest)
    else:
        bits.copy_(codes)
    bits.bitwise_left_shift_(SHIFT).add_(base)
    out.sub_(base.view(torch.float32))
    if code.signed:
        bits.bitwise_or_(scratch)


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    bases: torch.Tensor,
    code: Code,
    added: torch.Tensor | None = None,
) -> None:
    """Write the codes of some blocks; ``values`` are used up.

    Args:
        values: contiguous float32 ``[blocks, 256]``; not negative for ``UNSIGNED``.
        codes: uint8 ``[blocks, 256]`` to write to.
        bases: uint8 ``[blocks]`` to write to.
        code: to write.
        added: what ``dither`` returns, as many values as ``values`` has; rounds to the nearest where missing.
    """
    bits = values.view(torch.int32)
    mark = torch.signbit(values) if code.signed else torch.gt(values, 0)
    base = _bases(values.abs_().amax(dim=1, keepdim=True), code)
    values.add_(base.view(torch.float32))
    if added is None:
        bits.add_((1 << (SHIFT - 1)) - base)
    else:
        bits.add_(added.view_as(bits)).sub_(base)
    bits.bitwise_right_shift_(SHIFT).clamp_(max=code.largest)
    codes.copy_(bits)
    bases.copy_(base.bitwise_right_shift_(_EXPONENT_SHIFT)[:, 0])
    if code.signed:
        codes.add_(mark.view(torch.uint8), alpha=code.largest + 1)
    else:
        torch.maximum(codes, mark.view(torch.uint8), out=codes)


def _bases(largest: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the bits of each block's base as a float, int32 ``[blocks, 1]``."""
    # From the octave that the largest value reaches with the base added, as the decoded values do, too.
    base = largest.nan_to_num_(nan=torch.inf, posinf=torch.inf).view(torch.int32)
    return base.add_(code.margin).bitwise_and_(EXPONENT).sub_(code.span).clamp_(min=0)


def coded(values: torch.Tensor, code: Code) -> torch.Tensor:
    """Return all bytes of a float32 vector, each value rounded to the nearest."""
    found = torch.empty(coded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    padded = values.new_zeros(num_blocks(values.numel()), BLOCK)
    padded.view(-1)[: values.numel()] = values
    encode(padded, *parts(found), code)
    return found


def decoded(found: torch.Tensor, num_values: int, code: Code) -> torch.Tensor:
    """Return the ``num_values`` float32 values of coded bytes."""
    codes, bases = parts(found)
    out = torch.empty(codes.shape, dtype=torch.float32, device=found.device)
    decode(codes, bases, out, torch.empty_like(codes, dtype=torch.int32), code)
    return out.view(-1)[:num_values]
