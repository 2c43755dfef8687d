"""Blocks of llama.cpp's files as values, in plain torch: what compiled code has to agree with, bit for bit.

Numbers are little-endian, scales are float16. Of every form a value is rounded once at most in float32: products of
a scale and a small whole number are exact there.

``q8_0``, 32 values
    The scale ``d``, 32 signed bytes: ``d * q``.
``q4_0``, 32 values
    ``d``, 16 bytes: the low four bits are the first 16 values, the high ones the rest: ``d * (q - 8)``.
``q4_k``, 256 values
    ``d``, ``dmin``, 12 bytes of eight scales and eight minima of six bits, 128 bytes: 32 of these hold two runs of 32
    values, in their low and in their high bits. A run has a scale and a minimum: ``d * scale * q - dmin * minimum``.
``q6_k``, 256 values
    128 bytes of lower four bits, 64 of upper two, 16 signed scales of 16 values each, ``d``: ``d * scale * (q - 32)``.
    Each half of the values lies in 64 and 32 of these bytes, in four runs of 32.
"""

from __future__ import annotations

import torch

from gascompile.formats.layout import BLOCKS


def decode_blocks(out: torch.Tensor, rows: torch.Tensor, form: str) -> None:
    """Write the values of ``rows``, ``[..., row_bytes]`` of uint8, into ``out``, ``[..., columns]`` of float32."""
    num_values, block_bytes = BLOCKS[form]
    blocks = rows.unflatten(-1, (-1, block_bytes))
    values = out.unflatten(-1, (-1, num_values))
    if form == "q8_0":
        values.copy_(blocks[..., 2:].view(torch.int8))
        values.mul_(_half(blocks, 0))
    elif form == "q4_0":
        packed = blocks[..., 2:]
        values[..., :16].copy_(packed & 15)
        values[..., 16:].copy_(packed >> 4)
        values.sub_(8).mul_(_half(blocks, 0))
    elif form == "q4_k":
        _decode_q4_k(values, blocks)
    else:
        _decode_q6_k(values, blocks)


def decode_bytes(num_rows: int, columns: int, form: str) -> int:
    """Return at least what ``decode_blocks`` allocates at once beside its result."""
    num_values, _ = BLOCKS[form]
    per_block = {"q8_0": 2 + 4 + 34, "q4_0": 2 + 4 + 16, "q4_k": 128 + 256, "q6_k": 128 + 192}
    return num_rows * columns // num_values * per_block[form]


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a float16 of each block in float32, ``[..., blocks, 1]``."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _decode_q4_k(values: torch.Tensor, blocks: torch.Tensor) -> None:
    coded, packed = blocks[..., 4:16], blocks[..., 16:].unflatten(-1, (4, 32))
    low, high = coded[..., :4], coded[..., 4:8]
    both = coded[..., 8:]
    scales = torch.cat((low & 63, (both & 15) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((high & 63, (both >> 4) | ((high >> 6) << 4)), dim=-1)
    runs = values.unflatten(-1, (4, 2, 32))
    runs[..., 0, :].copy_(packed & 15)
    runs[..., 1, :].copy_(packed >> 4)
    runs = values.unflatten(-1, (8, 32))
    runs.mul_((scales * _half(blocks, 0)).unsqueeze(-1))
    runs.sub_((minima * _half(blocks, 2)).unsqueeze(-1))


def _decode_q6_k(values: torch.Tensor, blocks: torch.Tensor) -> None:
    lower = blocks[..., :128].unflatten(-1, (2, 2, 32))
    upper = blocks[..., 128:192].unflatten(-1, (2, 32))
    runs = values.unflatten(-1, (2, 4, 32))
    for place in range(4):
        four = lower[..., place % 2, :]
        four = four >> 4 if place >= 2 else four & 15
        two = (upper >> 2 * place) & 3
        runs[..., place, :].copy_(four | (two << 4))
    scales = blocks[..., 192:208].view(torch.int8) * _half(blocks, 208)
    values.sub_(32)
    values.unflatten(-1, (16, 16)).mul_(scales.unsqueeze(-1))
