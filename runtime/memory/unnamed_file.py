"""Files without a name: whatever ends the process gives their space back."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from gascompile.core.errors import StorageError
from gascompile.core.sizes import format_size

_UNNAMED = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC


def open_unnamed(folder: Path, size_bytes: int) -> tuple[int, str]:
    """Return a new unnamed file of ``size_bytes``, and the path that its bytes take.

    Raises:
        StorageError: the folder cannot be written to, or has too little space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file, path = _open_as(folder, _UNNAMED | os.O_DIRECT), "O_DIRECT"
        except OSError:
            # Some file systems (tmpfs, some overlays) have no direct I/O; the page cache serves.
            file, path = _open_as(folder, _UNNAMED), "page cache"
    except OSError as error:
        raise _no_space(size_bytes, folder, error) from error
    try:
        take_space(file, folder, 0, size_bytes)
    except BaseException:
        os.close(file)
        raise
    return file, path


def take_space(file: int, folder: Path, offset: int, size_bytes: int) -> None:
    """Let a file have room from an offset on.

    Raises:
        StorageError: the drive has too little of it.
    """
    try:
        if size_bytes:
            os.posix_fallocate(file, offset, size_bytes)
    except OSError as error:
        raise _no_space(size_bytes, folder, error) from error


def _no_space(size_bytes: int, folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot take {format_size(size_bytes)} in {folder} for activations: {error.strerror}; "
        "free some space, or choose another cache_dir"
    )


def _open_as(folder: Path, flags: int) -> int:
    """Return a new file without a name; where the file system needs one, it has it for a moment."""
    try:
        return os.open(folder, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    made, name = tempfile.mkstemp(dir=folder, prefix=".spill-")
    try:
        return os.open(name, flags & ~_UNNAMED | os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(name)
        os.close(made)
