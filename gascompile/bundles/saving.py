"""Saving: a bundle goes to a folder of the user's choice, where nothing of the user's is lost."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from gascompile.bundles.bundle import (
    WEIGHTS_FOLDER,
    Bundle,
    content_stamp,
    require_unchanged,
    write_bundle,
)
from gascompile.bundles.files import FUSION, STEP, Weights
from gascompile.core.errors import StorageError
from gascompile.core.progress import task
from gascompile.weights.store import is_spilled

_WEIGHTS = re.compile(r"[0-9a-f]{40}\.safetensors")
_OWN_NAMES = re.compile(
    rf"manifest\.json|program\.json|plan\.json|weights\.json|held\.safetensors|{WEIGHTS_FOLDER}"
    rf"|{re.escape(FUSION)}|{re.escape(STEP)}|kernels-[0-9a-f]+\.(json|so)"
)
"""What may lie in a bundle."""


def save_bundle(bundle: Bundle, folder: Path) -> str:
    """Write ``bundle`` in the place of nothing or of an older one; return the digest it is read with.

    Weights that lie in the store or in a bundle become part of it, others are referred to.

    Raises:
        StorageError: the folder cannot be written or holds something else, or a weight file has changed.
    """
    require_replaceable(folder)
    stamps = bundle.weights.stamps
    for stamp in stamps:
        require_unchanged(stamp)
    with task("Hashing weights", sum(stamp.size_bytes for stamp in stamps)) as advance:
        hashed = tuple(content_stamp(stamp, advance) for stamp in stamps)
    weights = Weights(sources=bundle.weights.sources, stamps=hashed)
    paths = [Path(stamp.path) for stamp in hashed]
    enclosed = [path for path in paths if is_spilled(path) or _is_enclosed(path)]
    return write_bundle(replace(bundle, weights=weights), folder, overwrite=True, enclose=enclosed)


def lies_in(bundle: Bundle, folder: Path) -> bool:
    """Return whether weights of ``bundle`` are read from within ``folder``."""
    return any(folder.resolve() in Path(stamp.path).parents for stamp in bundle.weights.stamps)


def _is_enclosed(path: Path) -> bool:
    """Return whether a weight file is part of a bundle."""
    return path.parent.name == WEIGHTS_FOLDER and _WEIGHTS.fullmatch(path.name) is not None


def require_replaceable(folder: Path) -> None:
    """Return if ``folder`` may be replaced by a bundle: it is not there, empty, or a bundle and nothing else.

    Raises:
        StorageError: it holds something that would be lost.
    """
    if not os.path.lexists(folder):
        return
    try:
        there = sorted(path.name for path in folder.iterdir())
        weights = [path.name for path in (folder / WEIGHTS_FOLDER).glob("*")]
    except OSError as error:
        raise StorageError(
            f"{folder} is there, and no folder that a bundle could replace ({error.strerror or error}); "
            "choose another name"
        ) from error
    other = [name for name in there if not _OWN_NAMES.fullmatch(name)]
    other += [f"{WEIGHTS_FOLDER}/{name}" for name in weights if not _WEIGHTS.fullmatch(name)]
    if there and "manifest.json" not in there:
        other = other or there
    if other:
        raise StorageError(
            f"{folder} holds {ascii(other[0])[:200]}, which is of no bundle and would be lost: save to a folder that "
            "is not there yet, or move what is in this one"
        )
