"""Tied weights: what a checkpoint has under several names of one weight has to be the same, byte by byte.

Where the same bytes stand for all names, as files of ``torch.save`` have them, nothing is read. Otherwise the entries
are read in blocks up to the first difference; what was found equal is noted with the identity of the files, so that a
large table is read once, not at each start.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.core.files import identity_of, open_regular
from gascompile.core.sources import WeightSource

NOTES: Final = ".equal.json"
"""Name of the file of notes in a store's folder."""
_BLOCK_BYTES: Final = 4 << 20  # read at once, to be compared
_MOST_NOTES: Final = 256
"""Of the newest; each is of a weight of a checkpoint."""

_known_equal: set[str] = set()
"""Of this process, by ``_identity``."""


def require_same(name: str, stored: Sequence[WeightSource], where: str, store: Path | None) -> None:
    """Return if the entries of a weight's names are the same.

    Args:
        name: of the weight.
        stored: the entries that the checkpoint has under its names, of one dtype and shape.
        where: what errors call the checkpoint.
        store: folder in which it is noted what was found equal, if there is one.

    Raises:
        CheckpointError: they differ, or cannot be read.
    """
    first = stored[0]
    for other in stored[1:]:
        if other.extents == first.extents and _layout(other) == _layout(first):
            continue
        try:
            same = _layout(other) == _layout(first) and _equal(first, other, store)
        except (OSError, StorageError) as error:
            raise CheckpointError(f"cannot read '{name}' from {where}: {error}") from error
        if not same:
            raise CheckpointError(
                f"'{first.name}' and '{other.name}' are one weight in the model, and {where} has other values under "
                "each name; build the model without tied weights (tie_word_embeddings=False, in the config.json of a "
                "directory), as transformers then leaves them apart, or remove the entry that is not meant"
            )


def _layout(source: WeightSource) -> tuple[object, ...]:
    return source.dtype, source.shape, source.stride, source.interleaved_heads, source.size_bytes


def _equal(one: WeightSource, other: WeightSource, store: Path | None) -> bool:
    before = _identity(one, other)
    if before in _known_equal or (store is not None and before in _noted(store)):
        return True
    if any(a != b for a, b in zip(_blocks(one), _blocks(other), strict=True)):
        return False
    # Of files that were written to meanwhile nothing is believed.
    if _identity(one, other) == before:
        _known_equal.add(before)
        if store is not None:
            _note(store, before)
    return True


def _blocks(source: WeightSource) -> Iterator[bytes]:
    """Yield a weight's bytes, in blocks whose ends do not depend on where they lie."""
    rest = b""
    for extent in source.extents:
        with open(open_regular(extent.path), "rb", buffering=0) as stream:
            stream.seek(extent.offset)
            left_bytes = extent.size_bytes
            while left_bytes:
                block = stream.read(min(left_bytes, _BLOCK_BYTES - len(rest)))
                if not block:
                    raise StorageError(f"{extent.path} has become shorter; download it again")
                left_bytes -= len(block)
                rest += block
                if len(rest) == _BLOCK_BYTES:
                    yield rest
                    rest = b""
    yield rest


def _identity(one: WeightSource, other: WeightSource) -> str:
    """Return a digest of where two weights lie, and of what says that files are what they were."""
    said: list[list[int]] = []
    for source in (one, other):
        said += [[*identity_of(of.path), of.offset, of.size_bytes] for of in source.extents]
        said.append([])
    return serial.raw_digest(json.dumps(said).encode())


def _noted(store: Path) -> list[str]:
    try:
        notes = serial.read_json(store / NOTES) if (store / NOTES).exists() else []
    except (FormatError, StorageError):
        return []
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _note(store: Path, identity: str) -> None:
    # Who cannot write compares again.
    with contextlib.suppress(StorageError, OSError):
        store.mkdir(parents=True, exist_ok=True)
        serial.write_atomic(
            store / NOTES, json.dumps([*_noted(store), identity][-_MOST_NOTES:], indent=1)
        )
