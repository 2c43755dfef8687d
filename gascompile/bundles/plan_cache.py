"""The plan cache: one bundle per fingerprint. A damaged entry is a miss with a warning, never an error."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gascompile.bundles.bundle import Bundle, read_bundle, write_bundle
from gascompile.bundles.files import read_bundle_files
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError, UnsupportedOpError
from gascompile.core.own_files import fault_of, own_cache

_log = logging.getLogger("gascompile")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cached plan, for listings."""

    key: str
    model: str
    size_bytes: int
    age_s: float
    ok: bool
    weight_files: frozenset[str] = frozenset()
    """Files that the plan's weights lie in; empty where the entry is damaged."""


def plans_dir(cache_dir: Path) -> Path:
    """Return the folder of all cached plans."""
    return cache_dir / "plans"


def folder_of(cache_dir: Path, prints: Mapping[str, str]) -> Path:
    """Return the folder of the plan with these fingerprints."""
    return plans_dir(cache_dir) / serial.digest(prints)


def read(folder: Path, prints: Mapping[str, str]) -> Bundle | None:
    """Return the cached bundle, or ``None`` when there is none or it cannot be used."""
    if not folder.exists():
        return None
    if fault := fault_of(folder.parent.stat()) or fault_of(folder.stat()):
        _log.warning("the cache entry %s is not used: %s; planning again", folder.name, fault)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    try:
        bundle = read_bundle(folder, allow_code=True)  # written here, by this user
    except (FormatError, StorageError) as error:
        _log.warning("the cache entry %s cannot be used (%s); planning again", folder.name, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if dict(bundle.plan.fingerprint) != dict(prints):
        _log.warning("the cache entry %s was made from other inputs; planning again", folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return bundle


def write(folder: Path, bundle: Bundle, *, damaged: bool) -> None:
    """Keep ``bundle``; a cache that cannot be written costs time, not the job."""
    own_cache(folder.parent)
    try:
        write_bundle(bundle, folder, overwrite=damaged)
        folder.chmod(0o700)
    except (OSError, StorageError, UnsupportedOpError) as error:
        _log.warning("the plan is not kept: %s", error)


def entries(cache_dir: Path) -> list[CacheEntry]:
    """Return all cached plans, newest first; one that another process removes meanwhile is left out."""
    all_entries = [
        _entry(folder) for folder in plans_dir(cache_dir).glob("[0-9a-f]*") if folder.is_dir()
    ]
    return sorted(
        (entry for entry in all_entries if entry is not None), key=lambda entry: entry.age_s
    )


def _entry(folder: Path) -> CacheEntry | None:
    name, ok, weight_files = "(damaged)", True, frozenset[str]()
    try:
        files = read_bundle_files(folder)
        name = files.plan.workload.name
        weight_files = frozenset(stamp.path for stamp in files.weights.stamps)
    except (FormatError, StorageError):
        ok = False
    try:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        written_s = folder.stat().st_mtime
    except FileNotFoundError:
        return None
    return CacheEntry(
        key=folder.name,
        model=name,
        size_bytes=size_bytes,
        age_s=max(time.time() - written_s, 0.0),
        ok=ok,
        weight_files=weight_files,
    )


def remove(cache_dir: Path, key: str) -> None:
    """Remove one plan: it disappears at once, so that no reader sees half of it.

    Raises:
        StorageError: the folder cannot be renamed or removed.
    """
    folder = plans_dir(cache_dir) / key
    try:
        retired = tempfile.mkdtemp(dir=folder.parent, prefix=f".{key}.old.")
        try:
            folder.rename(Path(retired) / "bundle")
        finally:
            shutil.rmtree(retired)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(
            f"cannot remove {folder}: {error.strerror or error}; check its permissions"
        ) from error
