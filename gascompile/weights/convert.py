"""Weights converted to their transfer formats once, in a file of the store that is read like any safetensors file.

The file's name is a hash of what it is made from: the stamps of the source files, where each weight lies in
them, and its form. Weights are streamed through block by block, so memory stays small whatever the model;
the error of each is measured on the way and stands in the file's metadata, with a hash of the whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from gascompile.bundles.bundle import require_unchanged
from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.core.files import exclusive
from gascompile.core.progress import task
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.formats.layout import DEFAULT_GROUPS, FORMS, LAYOUT
from gascompile.formats.ops import transfer_matrix
from gascompile.formats.quantize import pack, squared_error
from gascompile.weights.checkpoint import (
    Checkpoint,
    file_dtype,
    open_checkpoint,
)
from gascompile.weights.file_kinds import is_gguf, is_pickled
from gascompile.weights.rows import WeightRows
from gascompile.weights.store import writing
from gascompile.weights.store_check import Advance, Hash, is_whole, note_whole

_BLOCK_VALUES = 1 << 21  # 8 MiB of float32 at once
_ERRORS = "gascompile.core.errors"
_PACKING = "gascompile.formats.layout"
_CONTENT = "gascompile.content"
_NO_CONTENT = "0" * 40
"""Stands in the place of the hash while the file is hashed."""
_NO_ERROR = f"{0.0:.6e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One weight to convert."""

    source: WeightSource
    wire: str

    @property
    def group(self) -> int:
        """Columns that share a scale in a packed form; 0 in others."""
        return DEFAULT_GROUPS.get(self.wire, 0)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns; only a packed form minds how a weight is shaped."""
        if self.wire in FORMS:
            return self.source.shape[0], self.source.shape[1]
        return math.prod(self.source.shape), 1

    @property
    def transfer_shape(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape in the store."""
        if self.wire in FORMS:
            return transfer_matrix(self.wire, *self.matrix, self.group)
        return self.wire, self.source.shape

    @property
    def size_bytes(self) -> int:
        """Bytes in the store."""
        name, shape = self.transfer_shape
        dtype: torch.dtype = getattr(torch, name)
        return math.prod(shape) * dtype.itemsize


def converted(items: Mapping[str, Item], stamps: Sequence[FileStamp], store: Path) -> Checkpoint:
    """Return where the transfer formats of ``items`` lie, which are written into ``store`` unless they are there.

    Args:
        items: weights by the name that the program has for them.
        stamps: of the files that they lie in.
        store: the folder.

    Raises:
        StorageError: a source cannot be read or has changed; the disk is too full, which is found before
            writing, or cannot be written.
        CheckpointError: a weight has values that its form cannot hold.
    """
    target = store / f"{_key(items, stamps)}.safetensors"
    with exclusive(store / ".lock"):
        if not is_whole(target, lambda advance: _holds(target, advance)):
            _write(items, stamps, target)
            note_whole(target)
    return open_checkpoint(target)


def conversion_errors(path: str | Path) -> Mapping[str, float]:
    """Return the error that converting made to each weight of a file; nothing for files of another origin.

    Raises:
        FormatError: the file is damaged.
        StorageError: it cannot be read.
    """
    try:
        if Path(path).suffix != ".safetensors" or is_gguf(Path(path)) or is_pickled(Path(path)):
            return {}
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        metadata = header.get("__metadata__", {})
        if _PACKING not in metadata:
            return {}
        return {str(name): float(error) for name, error in json.loads(metadata[_ERRORS]).items()}
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} does not say what converting it lost ({error})") from error


def _key(items: Mapping[str, Item], stamps: Sequence[FileStamp]) -> str:
    """Return a hash of all that the file is made from; where the sources lie does not matter.

    The time of a file's content may be set, as archives and images do, to one that others have; that of its last change
    may not.
    """
    known = {
        stamp.path: [stamp.digest, stamp.size_bytes, stamp.mtime_ns, _changed_ns(stamp.path)]
        for stamp in stamps
    }
    parts = [
        [
            name,
            item.wire,
            item.group,
            item.source.dtype,
            list(item.source.shape),
            [[known[e.path], e.offset, e.size_bytes] for e in item.source.extents],
        ]
        for name, item in sorted(items.items())
    ]
    raw = json.dumps([LAYOUT, _CONTENT, parts]).encode()
    return serial.raw_digest(raw)


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_ctime_ns
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _holds(path: Path, advance: Advance) -> bool:
    """Return whether a file has the hash that it says it has."""
    size_bytes = path.stat().st_size
    with open(path, "rb") as stream:
        header = stream.read(8)
        header += stream.read(min(int.from_bytes(header, "little"), size_bytes))
    said = json.loads(header[8:])["__metadata__"][_CONTENT]
    state = Hash()
    state.add_file(path, len(header), size_bytes - len(header), advance)
    state.add(header.replace(said.encode(), _NO_CONTENT.encode(), 1))
    return bool(state.text() == said)


def _write(items: Mapping[str, Item], stamps: Sequence[FileStamp], target: Path) -> None:
    # Packed rows keep their alignment to 16 bytes, and larger elements theirs.
    order = sorted(items, key=lambda n: (items[n].wire not in FORMS, -_itemsize(items[n]), n))
    needed_bytes = sum(item.size_bytes for item in items.values()) + (1 << 20)
    for left in target.parent.glob(f".{target.name}.*"):
        left.unlink(missing_ok=True)  # by a process that was killed: the lock is held here
    errors = dict.fromkeys(order, _NO_ERROR)
    total_bytes = sum(item.source.size_bytes for item in items.values())
    with writing(target, needed_bytes, "the converted weights") as temporary:
        with temporary.open("wb") as out, task("Converting weights", total_bytes) as advance:
            out.write(_header(items, order, errors, _NO_CONTENT))
            content = _Hashed(out)
            for name in order:
                errors[name] = f"{_convert(items[name], content, advance):.6e}"
            content.hash.add(_header(items, order, errors, _NO_CONTENT))
            out.seek(0)
            out.write(_header(items, order, errors, content.hash.text()))
            out.flush()
            os.fsync(out.fileno())
        used = {extent.path for item in items.values() for extent in item.source.extents}
        for stamp in stamps:
            if stamp.path in used:
                require_unchanged(stamp)


def _itemsize(item: Item) -> int:
    dtype: torch.dtype = getattr(torch, item.transfer_shape[0])
    return dtype.itemsize


class _Hashed:
    """Writes to a file and hashes what it writes."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.hash = Hash()

    def write(self, content: memoryview) -> None:
        self._out.write(content)
        self.hash.add(content)


def _header(
    items: Mapping[str, Item], order: Sequence[str], errors: Mapping[str, str], content: str
) -> bytes:
    """Return the head of the file; errors and hash have a fixed width, so its length is known before they are."""
    entries: dict[str, object] = {
        "__metadata__": {_CONTENT: content, _ERRORS: json.dumps(errors), _PACKING: str(LAYOUT)}
    }
    position = 0
    for name in order:
        dtype, shape = items[name].transfer_shape
        end = position + items[name].size_bytes
        entries[name] = {
            "dtype": file_dtype(dtype),
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(entries).encode()
    # Data that starts at a page is read directly from its first byte.
    raw += b" " * (align_up(8 + len(raw), PAGE_BYTES) - 8 - len(raw))
    return len(raw).to_bytes(8, "little") + raw


def _convert(item: Item, out: _Hashed, advance: Callable[[int], None]) -> float:
    """Write one weight in its transfer format and return its relative error."""
    wrong = total = 0.0
    for block in _blocks(item):
        try:
            wire = pack(block, item.wire, item.group)
        except ValueError as error:
            raise CheckpointError(
                f"'{item.source.name}' cannot move as {item.wire}: {error}; leave weights= out"
            ) from error
        out.write(wire.reshape(-1).view(torch.uint8).numpy().data)
        more = squared_error(block, wire, item.wire, item.group)
        wrong, total = wrong + more[0], total + more[1]
        advance(block.numel() * block.element_size())
    return math.sqrt(wrong / total) if total else 0.0


def _blocks(item: Item) -> Iterator[torch.Tensor]:
    """Yield the weight as matrices of some of its rows."""
    rows, columns = item.matrix
    step = max(1, _BLOCK_VALUES // columns)
    with WeightRows() as weights:
        for begin in range(0, rows, step):
            yield weights.rows(item.source, begin, min(begin + step, rows), columns)
