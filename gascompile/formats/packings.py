"""Packed weights of quantised safetensors: codes, scales and zero points that lie apart, each a tensor of its own.

Such a weight moves as the bytes that its files have, its parts one after the other, and has no rows that could be
told apart by their bytes: it is whole or not there. How it is packed is all in the name of its form, such as
``gptq4-g128-f16-v1``, ``awq4-g128-f16``, ``packed4-row-bf16-zeros`` or ``fp8-128x128-f32``:

``gptq`` (GPTQModel and AutoGPTQ)
    ``qweight`` has the codes of one column after the other, the first in the lowest bits, for all rows;
    ``qzeros`` those of the rows, for each group; ``scales`` of ``[groups, rows]``. ``v1`` stores zero points less one.
``awq`` (AutoAWQ's gemm)
    Words hold eight rows of a column, in the order 0 2 4 6 1 3 5 7 from the lowest bits on; so do the zero points.
``packed`` (compressed-tensors' pack-quantized)
    Rows of codes, the first in the lowest bits, filled up to whole words; scales of ``[rows, groups]``; zero points,
    if any, packed along the rows. Without them the middle of the codes is zero.
``fp8``
    A byte a value (E4M3) and a factor for all of them, for each row or for each block of rows and columns.

A value is ``(code - zero) * scale``, of which nothing is rounded but that product: once to float32 where scales are
float32, else not before it is rounded to what is computed in. ``idx`` names the group of each column.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_SCALES: Final = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
SCALE_NAMES: Final = {dtype: name for name, dtype in _SCALES.items()}
"""What the dtypes of scales are called in the names of forms."""
_CODES = re.compile(
    r"(gptq|awq|packed)([48])-(row|g[1-9][0-9]{0,7})-(f16|bf16|f32)(-v1|-zeros)?(-idx)?", re.ASCII
)
_FP8 = re.compile(r"fp8-(row|all|([1-9][0-9]{0,7})x([1-9][0-9]{0,7}))-(f16|bf16|f32)", re.ASCII)
_ITEMS: Final = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
WORD_BITS: Final = 32  # of int32, in which GPTQ and AWQ pack


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPart:
    """One of the tensors that a packed weight is made of."""

    name: str
    """``codes``, ``zeros``, ``scales`` or ``groups``."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes from the weight's first."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * _ITEMS[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the parts of a weight make up its values."""

    kind: str
    """``gptq``, ``awq``, ``packed`` or ``fp8``."""
    bits: int
    group: int = 0
    """Columns that share a scale; 0: all of a row."""
    block_rows: int = 1
    """Rows that share a scale; 0: all."""
    scale: str
    """Dtype of the scales."""
    zeros: bool = False
    is_less_one: bool = False
    """Whether the zero points are stored less one."""
    is_ordered: bool = False
    """Whether a part names the group of each column."""

    @property
    def form(self) -> str:
        """Return the name of the form."""
        scale = SCALE_NAMES[self.scale]
        if self.kind == "fp8":
            block = f"{self.block_rows}x{self.group}" if self.group else "all"
            return f"fp8-{'row' if not self.group and self.block_rows else block}-{scale}"
        zeros = "-v1" if self.kind == "gptq" and self.is_less_one else ""
        if self.kind == "packed" and self.zeros:
            zeros = "-zeros"
        group = f"g{self.group}" if self.group else "row"
        return f"{self.kind}{self.bits}-{group}-{scale}{zeros}{'-idx' if self.is_ordered else ''}"

    def num_groups(self, columns: int) -> int:
        """Return the scales of one row."""
        return -(-columns // self.group) if self.group else 1

    def parts(self, rows: int, columns: int) -> tuple[PackingPart, ...]:
        """Return the parts of a weight of ``rows x columns``, in the order in which they lie in memory."""
        groups, each = self.num_groups(columns), WORD_BITS // self.bits
        blocks = -(-rows // self.block_rows) if self.block_rows else 1
        scales = ("scales", self.scale, (groups, rows))
        tensors: list[tuple[str, str, tuple[int, ...]]]
        if self.kind == "gptq":
            tensors = [
                ("codes", "int32", (-(-columns // each), rows)),
                ("zeros", "int32", (groups, -(-rows // each))),
                scales,
            ]
        elif self.kind == "awq":
            words = -(-rows // each)
            tensors = [
                ("codes", "int32", (columns, words)),
                ("zeros", "int32", (groups, words)),
                scales,
            ]
        elif self.kind == "packed":
            tensors = [("codes", "int32", (rows, -(-columns // each)))]
            if self.zeros:
                tensors.append(("zeros", "int32", (-(-rows // each), groups)))
            tensors.append(("scales", self.scale, (rows, groups)))
        else:
            tensors = [
                ("codes", "float8_e4m3fn", (rows, columns)),
                ("scales", self.scale, (blocks, groups)),
            ]
        if self.is_ordered:
            tensors.insert(1, ("groups", "int32", (columns,)))
        parts: list[PackingPart] = []
        offset = 0
        for name, dtype, shape in tensors:
            parts.append(PackingPart(name=name, dtype=dtype, shape=shape, offset=offset))
            offset = parts[-1].offset + parts[-1].size_bytes
        return tuple(parts)

    def size_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight of ``rows x columns``."""
        last = self.parts(rows, columns)[-1]
        return last.offset + last.size_bytes


@lru_cache(maxsize=1024)
def packing_of(form: str) -> Packing | None:
    """Return what the name of a form says; ``None`` where it names none of these."""
    if match := _FP8.fullmatch(form):
        block_rows = {"row": 1, "all": 0}.get(match[1])
        return Packing(
            kind="fp8",
            bits=8,
            group=int(match[3] or 0),
            block_rows=int(match[2] or 0) if block_rows is None else block_rows,
            scale=_SCALES[match[4]],
        )
    match = _CODES.fullmatch(form)
    if match is None:
        return None
    kind, bits, group, scale, zeros, ordered = match.groups()
    packing = Packing(
        kind=kind,
        bits=int(bits),
        group=0 if group == "row" else int(group[1:]),
        scale=_SCALES[scale],
        zeros=kind != "packed" or zeros is not None,
        is_less_one=zeros == "-v1",
        is_ordered=ordered is not None,
    )
    # Only what a packing calls itself is a name: `awq8` and `packed4-v1` are none.
    is_known = packing.form == form and not (kind == "awq" and (bits != "4" or ordered))
    return packing if is_known else None


@lru_cache(maxsize=4096)
def rows_of(form: str, columns: int, size_bytes: int) -> int:
    """Return the rows of a packed weight by its bytes, which grow with them.

    Raises:
        ValueError: no number of rows has so many bytes.
    """
    packing = packing_of(form)
    assert packing is not None, f"{form} is none of these forms"
    low, high = 0, max(size_bytes, 1) * 8
    while low < high:
        middle = (low + high) // 2
        if packing.size_bytes(middle, columns) < size_bytes:
            low = middle + 1
        else:
            high = middle
    if packing.size_bytes(low, columns) != size_bytes:
        raise ValueError(
            f"{size_bytes} bytes of {form} are no whole rows of {columns} columns; compile the model again"
        )
    return low
