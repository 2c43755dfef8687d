"""GGUF, the format of llama.cpp's files: where each tensor lies. The header is read, weights are not.

A header is untrusted: every count and length is held against the bytes that the file has, nothing is made room for
before it was read, and what is not known is refused. All numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from gascompile.core import serial
from gascompile.core.errors import CheckpointError
from gascompile.core.sizes import align_up
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.formats.layout import BLOCKS
from gascompile.weights.file_kinds import GGUF_MAGIC
from gascompile.weights.opening import opened

Scalar = int | float | bool | str
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 100 << 20
"""Vocabularies of 250,000 words with their merges take some 20 MB."""
_CHUNK_BYTES = 1 << 20
"""Of a header that are read at once; also the largest alignment that is believed."""
_MAX_DIMENSIONS = 4  # GGML's own limit
_MAX_NAME_BYTES = 1 << 10  # of a tensor; GGML's own limit is 64
_MAX_DEPTH = 4  # of arrays in arrays, each a recursion
_MAX_TEXT_BYTES = 1 << 16  # GGUF's own limit of a key
_MAX_ITEMS = 1 << 21
"""Of a list that is passed over item by item: several times the words and merges of the largest vocabularies."""
_PLAIN: Final[Mapping[int, tuple[str, int]]] = {
    0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2),
}  # fmt: skip
_PACKED: Final[Mapping[int, str]] = {2: "q4_0", 8: "q8_0", 12: "q4_k", 14: "q6_k"}
_OTHERS: Final[Mapping[int, str]] = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What the header of one file says."""

    sources: Mapping[str, WeightSource]
    """Tensors by llama.cpp's names. A packed one has its form as dtype and the shape of its values."""
    metadata: Mapping[str, Scalar]
    """Numbers and texts by key; lists are left out."""
    stamp: FileStamp


@dataclass(slots=True)
class _Cursor:
    """Reads a header in order, and keeps what it has read."""

    stream: BinaryIO
    file: Path
    size_bytes: int
    raw: bytearray = field(default_factory=bytearray)
    position: int = 0

    def skip(self, count: int) -> int:
        """Return where the next ``count`` bytes begin, once they are there."""
        begin, end = self.position, self.position + count
        if end > min(self.size_bytes, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.file} is truncated or corrupt: its header goes on beyond byte "
                f"{min(self.size_bytes, _MAX_HEADER_BYTES)}; download it again"
            )
        while len(self.raw) < end:
            more = self.stream.read(max(end - len(self.raw), _CHUNK_BYTES))
            if not more:
                raise CheckpointError(f"{self.file} ends in its header; download it again")
            self.raw += more
        self.position = end
        return begin

    def scalar(self, form: str) -> int | float | bool:
        """Return one number, in a form of ``struct``'s."""
        begin = self.skip(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self.raw, begin)[0]
        return value

    def count(self, form: str = "<Q") -> int:
        """Return one number that counts something."""
        return int(self.scalar(form))

    def text(self, max_bytes: int = _MAX_TEXT_BYTES) -> str:
        """Return one text; what is no text, or too long for one, is refused."""
        length = self.count()
        begin = self.skip(length)
        if length > max_bytes:
            raise self.corrupt(f"a text of {length} bytes")
        try:
            return self.raw[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt("a text that is none") from error

    def corrupt(self, what: str) -> CheckpointError:
        """Return the error for what cannot be."""
        return CheckpointError(f"{self.file} has {what} in its header; download it again")


def read_gguf_header(file: Path) -> GgufHeader:
    """Return where the tensors of one file lie, and what the file says of its model.

    Raises:
        CheckpointError: it cannot be read, is truncated or corrupt, one of several parts, or has tensors of a type
            that is not known.
    """
    with opened(file) as stream:
        stat = os.fstat(stream.fileno())
        cursor = _Cursor(stream, file, stat.st_size)
        metadata, sources = _parse(cursor)
    digest = serial.raw_digest(cursor.raw[: cursor.position])
    stamp = FileStamp.of(str(file.resolve()), stat, digest)
    return GgufHeader(sources=sources, metadata=metadata, stamp=stamp)


def _parse(cursor: _Cursor) -> tuple[dict[str, Scalar], dict[str, WeightSource]]:
    file = cursor.file
    cursor.skip(4)
    version = cursor.count("<I")
    if cursor.raw[:4] != GGUF_MAGIC or version not in _VERSIONS:
        raise CheckpointError(
            f"{file} is no GGUF file of version 2 or 3 with little-endian numbers; convert the model again with a "
            "llama.cpp of today"
        )
    num_tensors, num_pairs = cursor.count(), cursor.count()
    metadata: dict[str, Scalar] = {}
    keys: set[str] = set()
    for _ in range(num_pairs):
        key = cursor.text()
        if key in keys:
            raise cursor.corrupt(f"{ascii(key)[:200]} twice")
        keys.add(key)
        value = _value(cursor, cursor.count("<I"), 0)
        if value is not None:
            metadata[key] = value
    if _number(metadata, "split.count", 1) > 1:
        raise CheckpointError(
            f"{file} is one of {metadata['split.count']} parts; merge them with llama-gguf-split --merge"
        )
    alignment = _number(metadata, "general.alignment", 32)
    if alignment < 8 or alignment & (alignment - 1) or alignment > _CHUNK_BYTES:
        raise cursor.corrupt(f"an alignment of {alignment}")
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, entry = _tensor(cursor, alignment)
        if name in entries:
            raise cursor.corrupt(f"the tensor '{name}' twice")
        entries[name] = entry
    return metadata, _sources(cursor, entries, align_up(cursor.position, alignment))


def _number(metadata: Mapping[str, Scalar], key: str, otherwise: int) -> int:
    value = metadata.get(key, otherwise)
    return value if isinstance(value, int) else -1


def _value(cursor: _Cursor, kind: int, depth: int) -> Scalar | None:
    """Return a number or a text; ``None`` for a list, which is only passed over."""
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _TEXT:
        return cursor.text()
    if kind != _ARRAY or depth == _MAX_DEPTH:
        raise cursor.corrupt(f"a value of the type {kind}")
    kind, length = cursor.count("<I"), cursor.count()
    if kind in _SCALARS:
        cursor.skip(length * struct.calcsize(_SCALARS[kind]))
    elif length > _MAX_ITEMS:
        raise cursor.corrupt(f"a list of {length} items")
    elif kind == _TEXT:
        for _ in range(length):
            cursor.skip(cursor.count())
    else:
        for _ in range(length):
            _value(cursor, kind, depth + 1)
    return None


def _tensor(cursor: _Cursor, alignment: int) -> tuple[str, tuple[str, tuple[int, ...], int, int]]:
    """Return a tensor's name with its dtype, shape, offset in the data and bytes."""
    name = cursor.text(_MAX_NAME_BYTES)
    num_dimensions = cursor.count("<I")
    if not name or not name.isprintable() or not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.corrupt(f"a tensor {ascii(name)[:200]} of {num_dimensions} dimensions")
    # The first one counts values that follow each other.
    shape = tuple(cursor.count() for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.count("<I"), cursor.count()
    if kind not in _PLAIN and kind not in _PACKED:
        raise CheckpointError(
            f"{cursor.file}: '{name}' has the type {_OTHERS.get(kind, kind)}, which cannot be read in place; those "
            "that can are F32, F16, BF16, Q8_0, Q4_0, Q4_K and Q6_K: make such a file with llama-quantize, from the "
            "model before it was quantised"
        )
    num_values = 1
    for dim in shape:
        num_values *= dim
        if not 0 < dim < 1 << 40 or num_values >= 1 << 60:
            raise cursor.corrupt(f"a tensor '{name}' of the shape {list(shape)}")
    if kind in _PLAIN:
        dtype, itemsize = _PLAIN[kind]
        size_bytes = num_values * itemsize
    else:
        dtype = _PACKED[kind]
        block_values, block_bytes = BLOCKS[dtype]
        if num_dimensions != 2:
            raise CheckpointError(
                f"{cursor.file}: '{name}' of {dtype} is of {list(shape)}, and blocks are read of matrices only; "
                "use safetensors for mixtures of experts"
            )
        if shape[-1] % block_values:
            raise cursor.corrupt(f"a tensor '{name}' of {dtype} with rows of {shape[-1]} values")
        size_bytes = num_values // block_values * block_bytes
    if offset % alignment:
        raise cursor.corrupt(f"a tensor '{name}' at {offset}, which is not aligned")
    return name, (dtype, shape, offset, size_bytes)


def _sources(
    cursor: _Cursor,
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]],
    data_start: int,
) -> dict[str, WeightSource]:
    path, previous = str(cursor.file.resolve()), 0
    sources = {}
    for name, (dtype, shape, offset, size_bytes) in sorted(entries.items(), key=lambda e: e[1][2]):
        if offset < previous:
            raise cursor.corrupt(f"a tensor '{name}' that begins inside of another")
        previous = offset + size_bytes
        if data_start + previous > cursor.size_bytes:
            raise CheckpointError(
                f"{cursor.file} is truncated: '{name}' ends at byte {data_start + previous}, the file has "
                f"{cursor.size_bytes}; download it again"
            )
        extent = Extent(path=path, offset=data_start + offset, size_bytes=size_bytes)
        sources[name] = WeightSource(name=name, dtype=dtype, shape=shape, extents=(extent,))
    return sources
