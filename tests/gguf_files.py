"""Blocks and files of llama.cpp's format for tests, by the ``gguf`` package's own writer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize

from gascompile.formats.layout import BLOCKS, row_bytes

TYPES: Mapping[str, Any] = {
    form: getattr(gguf.GGMLQuantizationType, form.upper()) for form in BLOCKS
}
_SCALES_AT = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}


def random_blocks(form: str, rows: int, columns: int, *, scale: float = 0.01) -> torch.Tensor:
    """Return ``[rows, row_bytes]`` in which every bit is random but the float16 scales, which stay small."""
    raw = torch.randint(0, 256, (rows, row_bytes(form, columns, 0)), dtype=torch.uint8)
    blocks = raw.view(rows, -1, BLOCKS[form][1])
    for offset in _SCALES_AT[form]:
        halves = (torch.randn(*blocks.shape[:2], 1) * scale).half()
        blocks[..., offset : offset + 2] = halves.view(torch.uint8)
    return raw


def oracle(rows: torch.Tensor, form: str) -> torch.Tensor:
    """Return what the ``gguf`` package takes blocks to be."""
    return torch.from_numpy(dequantize(rows.numpy(), TYPES[form]))
