"""The plan cache: one bundle per fingerprint. A damaged entry is a miss with a warning, never an error."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gascompile import serial
from gascompile.bundle import Bundle, read_bundle, write_bundle
from gascompile.errors import FormatError, StorageError

_log = logging.getLogger("gascompile")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cached plan, for listings."""

    key: str
    model: str
    size_bytes: int
    age_s: float
    ok: bool


def folder_of(cache_dir: Path, prints: Mapping[str, str]) -> Path:
    """Return the folder of the plan with these fingerprints."""
    return cache_dir / "plans" / serial.digest(prints)


def read(folder: Path, prints: Mapping[str, str]) -> Bundle | None:
    """Return the cached bundle, or ``None`` when there is none or it cannot be used."""
    if not folder.exists():
        return None
    try:
        bundle = read_bundle(folder)
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
    try:
        write_bundle(bundle, folder, replace=damaged)
    except StorageError as error:
        _log.warning("the plan is not kept: %s", error)


def entries(cache_dir: Path) -> list[CacheEntry]:
    """Return all cached plans, newest first."""
    found = []
    for folder in (cache_dir / "plans").glob("[0-9a-f]*"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        try:
            name, ok = read_bundle(folder).program.name, True
        except (FormatError, StorageError):
            name, ok = "(damaged)", False
        found.append(
            CacheEntry(
                key=folder.name,
                model=name,
                size_bytes=sum(path.stat().st_size for path in files),
                age_s=max(time.time() - folder.stat().st_mtime, 0.0),
                ok=ok,
            )
        )
    return sorted(found, key=lambda entry: entry.age_s)
