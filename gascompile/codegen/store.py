"""The kernels that were compiled here: reused by other plans, and the list of machine code to trust.

``kernels/<digest>.json`` and ``.so`` are one library, ``kernels/keys/<key>`` names the library that holds a
segment's kernel. Code from a bundle is loaded if its digest is that of a library in here: then this user made
exactly these bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.core.kernels import KernelFiles, KernelLibrary
from gascompile.core.own_files import is_own, own_cache, read_own

_log = logging.getLogger("gascompile")
_DIGEST = re.compile(r"[0-9a-f]{40}")


def folder_of(cache_dir: Path) -> Path:
    """Return the folder of all kernels."""
    return cache_dir / "kernels"


def keep(files: KernelFiles, cache_dir: Path) -> None:
    """Store a library that was compiled here, and with that trust it.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = folder_of(cache_dir)
    try:
        own_cache(folder)
        own_cache(folder / "keys")
        serial.write_atomic(folder / f"{files.digest}.json", files.record)
        serial.write_atomic(folder / f"{files.digest}.so", files.code)
        library = read_record(files.record)
        for key in library.kernels:
            serial.write_atomic(folder / "keys" / _name(key, library.built_for), files.digest)
    except OSError as error:
        raise StorageError(f"cannot keep kernels in {folder}: {error.strerror or error}") from error


def find(keys: Iterable[str], built_for: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
    """Return the digest of a library that holds the kernel of a key, for those that there are."""
    digest_of = {}
    for key in keys:
        try:
            text = read_own(folder_of(cache_dir) / "keys" / _name(key, built_for)).decode("ascii")
        except (OSError, StorageError, UnicodeDecodeError):
            continue
        if _DIGEST.fullmatch(text) and is_trusted(text, cache_dir):
            digest_of[key] = text
    return digest_of


def is_trusted(digest: str, cache_dir: Path) -> bool:
    """Return whether the code with this digest was compiled by this user here."""
    return is_own(folder_of(cache_dir) / f"{digest}.so")


def read(digest: str, cache_dir: Path) -> KernelFiles | None:
    """Return a stored library; ``None``, with a warning, where its files are damaged or gone."""
    folder = folder_of(cache_dir)
    try:
        record = read_own(folder / f"{digest}.json")
        files = KernelFiles(record=record, code=read_own(folder / f"{digest}.so"))
    except (OSError, StorageError) as error:
        _log.warning("the kernels %s cannot be read (%s); compiling again", digest, error)
        return None
    if files.digest != digest:
        _log.warning("the kernels %s are damaged; compiling again", digest)
        return None
    return files


def read_record(record: bytes) -> KernelLibrary:
    """Return the calls of a library.

    Raises:
        FormatError: it is no such record.
    """
    data = serial.parse_json(record, where="the record of fused kernels")
    return serial.from_json(KernelLibrary, data, where="kernels")


def _name(key: str, built_for: Mapping[str, str]) -> str:
    return f"{key}-{serial.digest(dict(built_for))[:16]}"
