"""Pieces: where files have the values of a tensor, whole or as boxes that several ranks have written.

A rank keeps ranges of a tensor's elements in their order. A range is a few boxes, which are tensors of their own in a
safetensors file; what boxes they are is in the file's metadata.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from gascompile.core.errors import CheckpointError, FormatError
from gascompile.core.serial import parse_json
from gascompile.weights.checkpoint import read_safetensors_header

PIECES = "gascompile.pieces"
"""Key of a file's metadata: of each tensor that is a box, what of which tensor it is."""
_CHUNK_BYTES = 4 << 20
"""Read by one call. Chosen, not measured."""
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A box of a tensor, in its order of rows, in a file."""

    offsets: Numbers
    """Its first element."""
    sizes: Numbers
    file: Path
    at: int
    """First byte in the file."""

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return where it lies in the tensor."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a checkpoint; no element is in two of its pieces."""

    name: str
    dtype: str
    shape: Numbers
    pieces: tuple[TensorPiece, ...]

    @property
    def num_stored(self) -> int:
        """Elements that files have of it."""
        return sum(piece.num_elements for piece in self.pieces)

    def has(self, begin: int, end: int) -> bool:
        """Return whether files have its elements ``begin`` to ``end``, in order of rows."""
        runs = self.runs
        if runs is None or self.num_stored == math.prod(self.shape):
            return self.num_stored == math.prod(self.shape)
        spans = [(first, first + piece.num_elements) for first, piece in runs]
        return sum(max(min(end, e) - max(begin, b), 0) for b, e in spans) == max(end - begin, 0)

    @property
    def runs(self) -> list[tuple[int, TensorPiece]] | None:
        """Return the pieces with their first elements in order of rows, if each is a run of such elements."""
        begins = [run_of(self.shape, piece) for piece in self.pieces]
        if any(begin is None for begin in begins):
            return None
        pairs = zip((begin or 0 for begin in begins), self.pieces, strict=True)
        return sorted(pairs, key=lambda pair: pair[0])


def boxes(shape: Sequence[int], begin: int, end: int) -> list[tuple[Numbers, Numbers]]:
    """Return the boxes that elements ``begin`` to ``end`` of a tensor are, one after the other: offsets and sizes."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    zeros, whole = (0,) * (len(shape) - 1), tuple(shape[1:])
    if begin % row == 0 and end % row == 0:
        return [((first, *zeros), (last + 1 - first, *whole))]
    if first == last:
        inner = boxes(whole, begin - first * row, end - first * row)
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in inner]
    head, tail = -(-begin // row) * row, end // row * row
    parts = ((begin, head), (head, tail), (tail, end))
    return [box for part in parts for box in boxes(shape, *part)]


def run_of(shape: Sequence[int], piece: TensorPiece) -> int | None:
    """Return the first element of a box whose elements follow each other in the tensor; ``None`` of another."""
    begin, is_whole = 0, True
    for size, length in zip(reversed(shape), reversed(piece.sizes), strict=True):
        if not is_whole and length != 1:
            return None
        is_whole = is_whole and length == size
    for size, offset in zip(shape, piece.offsets, strict=True):
        begin = begin * size + offset
    return begin


def stored_in(files: Iterable[Path], *, whole: bool = True) -> dict[str, Stored]:
    """Return the tensors of safetensors files, some of which may have boxes of them.

    What is in several files alike is taken from the first.

    Args:
        files: in any order.
        whole: whether they have to have all of each tensor.

    Raises:
        CheckpointError: a file cannot be read, or what files have of a tensor is not all of it, each element once.
    """
    kinds: dict[str, tuple[str, Numbers]] = {}
    pieces: dict[str, dict[tuple[Numbers, Numbers], TensorPiece]] = {}
    for file in files:
        sources, _ = read_safetensors_header(file)
        table = _table(file)
        for key, source in sources.items():
            name, offsets, shape = table.get(
                key, (key, (0,) * len(source.shape), tuple(source.shape))
            )
            kind = (source.dtype, shape)
            if kinds.setdefault(name, kind) != kind or len(source.shape) != len(shape):
                raise CheckpointError(f"{file} has '{key}' of another tensor '{name}' than others")
            at = source.extents[0].offset if source.extents else 0
            piece = TensorPiece(offsets=offsets, sizes=tuple(source.shape), file=file, at=at)
            pieces.setdefault(name, {}).setdefault((piece.offsets, piece.sizes), piece)
    stored_as = {
        name: Stored(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces[name].values()))
        for name, (dtype, shape) in kinds.items()
    }
    for stored in stored_as.values():
        _require_sound(stored, whole=whole)
    return stored_as


def _table(file: Path) -> dict[str, tuple[str, Numbers, Numbers]]:
    """Return what the metadata of a file say of its boxes: name, first element and shape of the tensor."""
    try:
        with file.open("rb") as stream:
            (size_bytes,) = struct.unpack("<Q", stream.read(8))
            header = parse_json(stream.read(size_bytes), where="its header")
        metadata = header.get("__metadata__", {})
        if PIECES not in metadata:
            return {}
        listed = parse_json(metadata[PIECES].encode(), where="its pieces")
        table = {}
        for key, (name, offsets, shape) in listed.items():
            numbers = [*offsets, *shape]
            if not isinstance(name, str) or len(offsets) != len(shape):
                raise ValueError(key)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(key)
            table[key] = (name, tuple(offsets), tuple(shape))
    except (FormatError, OSError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"{file} says wrongly what it has pieces of ({error}); take it from a backup"
        ) from error
    return table


def _require_sound(stored: Stored, *, whole: bool) -> None:
    total, wanted = stored.num_stored, math.prod(stored.shape)
    inside = all(
        offset + size <= length
        for piece in stored.pieces
        for offset, size, length in zip(piece.offsets, piece.sizes, stored.shape, strict=True)
    )
    # As much as all of it, within it, and none twice.
    if total > wanted or not inside or not _are_apart(stored) or (whole and total < wanted):
        names = sorted({piece.file.name for piece in stored.pieces})
        raise CheckpointError(
            f"'{stored.name}' of {stored.pieces[0].file.parent} is not whole: {len(stored.pieces)} pieces in "
            f"{', '.join(names[:4])} have {total} elements of {wanted}, or some twice; take it from a backup, and "
            "bring together what hosts with folders of their own have"
        )


def _are_apart(stored: Stored) -> bool:
    if len(stored.pieces) == 1:
        return True
    runs = stored.runs
    if runs is not None:
        spans = [(begin, begin + piece.num_elements) for begin, piece in runs]
        return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    begins = torch.tensor([piece.offsets for piece in stored.pieces])
    ends = begins + torch.tensor([piece.sizes for piece in stored.pieces])
    for number in range(1, len(begins)):
        meets = (begins[:number] < ends[number]) & (begins[number] < ends[:number])
        if bool(meets.all(dim=1).any()):
            return False
    return True


class Files:
    """Open files that pieces are read from."""

    def __init__(self) -> None:
        """Open none yet."""
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, piece: TensorPiece, skipped_bytes: int, into: torch.Tensor) -> None:
        """Fill a dense tensor with what follows the first ``skipped_bytes`` of a piece.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        if piece.file not in self._open:
            self._open[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
        target = tensor_bytes(into)
        done, at = 0, piece.at + skipped_bytes
        while done < len(target):
            got = os.preadv(self._open[piece.file], [target[done : done + _CHUNK_BYTES]], at + done)
            if got <= 0:
                raise OSError(errno.EIO, "the file ends before the tensor does")
            done += got

    def whole(self, stored: Stored, into: torch.Tensor) -> None:
        """Fill a dense tensor of its shape, in order of rows; raises ``OSError``."""
        for piece in stored.pieces:
            if len(stored.pieces) == 1:
                self.read(piece, 0, into)
                return
            box = into.new_empty(piece.sizes)
            self.read(piece, 0, box)
            into[piece.slices] = box

    def part(self, stored: Stored, begin: int, into: torch.Tensor) -> None:
        """Fill a dense tensor with the elements from ``begin`` on, in order of rows; raises ``OSError``."""
        into = into.view(-1)
        runs, size, end = stored.runs, into.element_size(), begin + into.numel()
        if runs is None:
            every = into.new_empty(stored.shape)
            self.whole(stored, every)
            into.copy_(every.reshape(-1)[begin:end])
            return
        for first, piece in runs:
            low, high = max(begin, first), min(end, first + piece.num_elements)
            if low < high:
                self.read(piece, (low - first) * size, into[low - begin : high - begin])


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a dense tensor's bytes, which do not keep it alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def named(
    name: str, shape: Sequence[int], offsets: Sequence[int]
) -> tuple[str, tuple[str, list[int], list[int]]]:
    """Return the key of a box in a file, and what the metadata says of it."""
    key = f"{name}@{','.join(map(str, offsets))}"
    return key, (name, list(offsets), list(shape))


def table_text(table: Mapping[str, tuple[str, list[int], list[int]]]) -> str:
    """Return the metadata of a file with boxes."""
    return json.dumps(table, separators=(",", ":"))
