"""Libraries of machine code that are compiled once and kept: whole, or compiled again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.core.own_files import own_cache, read_own

_log = logging.getLogger("gascompile")

_DIGEST_BYTES = 20


def kept_library(path: Path, build: Callable[[], bytes] | None) -> Path | None:
    """Return ``path`` once a whole library lies there; ``None`` where none does and none is to be built.

    Behind the code lies its digest, which loaders pass over: loading a damaged library may end the process.

    Args:
        path: of the library.
        build: returns its code.

    Raises:
        KernelBuildError: ``build`` failed.
        StorageError: the folder cannot be written to.
        OSError: the file cannot be read.
    """
    if path.exists():
        try:
            content = read_own(path)
        except StorageError as error:
            _log.warning("%s; it is compiled again", error)
            content = b""
        code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if code and _digest(code) == digest:
            return path
        if content:
            _log.warning("%s is damaged and is compiled again", path)
    if build is None:
        return None
    code = build()
    own_cache(path.parent)
    serial.write_atomic(path, code + _digest(code))
    return path


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()
