"""Digests of whole weight files, each read once after a boot: what was found is noted with the file's stamp."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gascompile.bundles.bundle import content_stamp
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import boot_id, identity_of
from gascompile.core.progress import task
from gascompile.core.sources import FileStamp

Compare = Callable[[str, bytes, Sequence[int]], list[list[int]]]
"""Returns each rank's numbers, once all ranks are there with the same facts; raises where they differ."""


def content_of(path: str, cache_dir: Path) -> str:
    """Return the digest of a file's content.

    Raises:
        StorageError: the file cannot be read.
    """
    note = cache_dir / "content" / f"{serial.digest(os.path.abspath(path))}.json"
    before = _identity(path)
    try:
        known = serial.read_json(note)
        if known["identity"] == before and isinstance(known["digest"], str):
            return known["digest"]
    except (FormatError, StorageError, KeyError, TypeError):
        pass
    size_bytes = int(before[3])
    with task(f"Comparing {Path(path).name}", size_bytes) as advance:
        stamp = FileStamp(path=path, size_bytes=size_bytes, mtime_ns=int(before[4]))
        content = content_stamp(stamp, advance).digest
    if _identity(path) == before:
        serial.write_atomic(note, serial.dumps({"identity": before, "digest": content}))
    return content


def require_same_files(paths: Sequence[str], compare: Compare, cache_dir: Path) -> None:
    """Return once it is known that the weight files of all ranks hold the same bytes; all ranks call it.

    Files that are one and the same are not read. Others may have any names.

    Raises:
        RankMismatchError: they do not, or are of another number.
        StorageError: a file cannot be read.
    """
    identities = sorted(_identity(path)[1:-1] for path in paths)
    place = int(serial.digest(identities)[:15], 16)
    told = compare("the number of weight files", str(len(paths)).encode(), [place])
    if any(row != told[0] for row in told):
        contents = sorted(content_of(path, cache_dir) for path in paths)
        compare("the content of the weight files", serial.digest(contents).encode(), ())


def _identity(path: str) -> list[str]:
    try:
        return [boot_id(), *map(str, identity_of(path))]
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
