"""Whether a file of the weight store still holds what was written: its content is hashed once after each boot.

No file system says that a bit has flipped. Hashing takes a core about a second per GiB, so what was found whole is
noted with the file's stamp and the machine's boot, and believed while both are the same. Callers hold the store's lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.core.files import boot_id, identity_of
from gascompile.core.progress import task

NOTES = ".checked.json"
"""Name of the file of notes in a store's folder."""
_BLOCK_BYTES = 4 << 20  # read at once, to be hashed
_DIGEST_BYTES = 20  # of the digest of a file

_log = logging.getLogger("gascompile")

Advance = Callable[[int], None]
"""Takes the bytes of each block that was read."""


class Hash:
    """A digest of strings and parts of files."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, content: bytes | memoryview | str) -> None:
        """Take in some bytes, or a string as UTF-8."""
        self._state.update(content.encode() if isinstance(content, str) else content)

    def add_file(
        self, path: str | os.PathLike[str], start: int, size_bytes: int, advance: Advance
    ) -> None:
        """Take in ``size_bytes`` of a file; raises ``EOFError`` or ``OSError`` where they cannot be read."""
        block = memoryview(bytearray(min(size_bytes, _BLOCK_BYTES)))
        with open(path, "rb", buffering=0) as stream:
            stream.seek(start)
            while size_bytes:
                count = stream.readinto(block[:size_bytes])
                if not count:
                    raise EOFError(f"{path} ends early")
                self._state.update(block[:count])
                size_bytes -= count
                advance(count)

    def text(self) -> str:
        """Return the digest of what was taken in so far."""
        return self._state.hexdigest()


def is_whole(path: Path, holds: Callable[[Advance], bool]) -> bool:
    """Return whether a file of a store is there and holds what was written; warns where it does not.

    Args:
        path: of the file.
        holds: reads it and says so; errors of damaged files count as no.
    """
    if not path.exists():
        return False
    before = identity_of(path)
    if _noted(path.parent).get(path.name) == before:
        return True
    try:
        with task(f"Checking {path.name}", path.stat().st_size) as advance:
            whole = holds(advance)
    except (OSError, EOFError, ValueError, KeyError, TypeError, CheckpointError) as error:
        _log.warning("%s cannot be read (%s) and is made again", path, error)
        return False
    if whole and identity_of(path) == before:
        note_whole(path)
    elif not whole:
        _log.warning("%s does not hold what was written to it and is made again", path)
    return whole


def note_whole(path: Path) -> None:
    """Believe until the next boot that a file holds what it should, unless it changes."""
    known = _noted(path.parent)
    known = {name: stamp for name, stamp in known.items() if (path.parent / name).exists()}
    known[path.name] = identity_of(path)
    try:
        serial.write_atomic(
            path.parent / NOTES, json.dumps({"boot": boot_id(), "files": known}, indent=1)
        )
    except StorageError as error:
        _log.warning("that %s is whole is not kept: %s", path, error)


def _noted(folder: Path) -> dict[str, list[int]]:
    if not (folder / NOTES).exists():
        return {}
    try:
        notes = serial.read_json(folder / NOTES)
        files = notes["files"] if notes["boot"] == boot_id() else {}
        return {str(name): list(stamp) for name, stamp in files.items()}
    except (FormatError, StorageError, KeyError, TypeError, AttributeError):
        # Whoever damaged the notes may have damaged the files.
        return {}
