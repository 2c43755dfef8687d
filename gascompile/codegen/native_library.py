"""Libraries of machine code that are compiled once and kept: whole, or compiled again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.core.own_files import own_cache, read_own

_log = logging.getLogger("gascompile")

_DIGEST_BYTES = 20  # at the end of a library, of what comes before


def kept_library(path: Path, build: Callable[[], bytes] | None) -> Path | None:
    """Return ``path`` once a whole library lies there; ``None`` where none does and none is to be built.

    Of several processes that miss it at once, as ranks of a host do, one builds it and the others wait. Behind the
    code lies its digest, which loaders pass over: loading a damaged library may end the process.

    Args:
        path: of the library.
        build: returns its code.

    Raises:
        KernelBuildError: ``build`` failed.
        StorageError: the folder cannot be written to.
        OSError: the file cannot be read.
    """
    if _is_whole(path):
        return path
    if build is None:
        return None
    own_cache(path.parent)
    with _alone_in(path.parent):
        if not _is_whole(path):
            code = build()
            serial.write_atomic(path, code + _digest(code))
    return path


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes.

    Where folders cannot be locked, each process builds its own library, and the last one stays.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"cannot write in {folder}: {error.strerror or error}; pass another cache_dir="
        ) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # A child of a fork may have the handle, too, and would hold the folder for ever.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        content = read_own(path)
    except StorageError as error:
        _log.warning("%s; it is compiled again", error)
        return False
    code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if code and _digest(code) == digest:
        return True
    if content:
        _log.warning("%s is damaged and is compiled again", path)
    return False


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()
