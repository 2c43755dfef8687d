"""Upkeep of the cache folder: list what is in it, remove by key, collect what is of no use any more.

Only files that GASCompile made itself are touched, and only below ``plans``, ``captures``, ``ranks``, ``store``,
``kernels``, ``native`` and ``machine``.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gascompile.bundles import plan_cache
from gascompile.bundles.kept_captures import captures_dir
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import exclusive, read_regular
from gascompile.cost_models.measure.disk import PROBE_PREFIX
from gascompile.weights import tied
from gascompile.weights.store_check import NOTES

GRACE_S = 3600.0
"""Files younger than this may belong to a process at work and are left alone by ``collect``."""


_OF_RANKS = {
    "exchanges": "what exchanges take",
    "division": "which parameters are divided",
    "stage": "plan of a stage",
}
"""What files of ranks are of, by how their names begin."""


_KEY_BYTES = 1000
"""At most, of the name that a key of compiled code leads to."""


class ItemKind(StrEnum):
    """What a cache item is."""

    PLAN = "plan"
    CAPTURE = "capture"
    RANKS = "ranks"
    WEIGHTS = "weights"
    CODE = "code"
    MACHINE = "machine"
    LEFTOVER = "leftover"


_AGING = (ItemKind.CAPTURE, ItemKind.RANKS)
"""Kinds that go with age and where the cache is too large, as plans do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """One thing in the cache."""

    key: str
    kind: ItemKind
    label: str
    size_bytes: int
    age_s: float
    """Since it was written."""
    path: str
    ok: bool = True
    """Undamaged and, for spilled weights, needed by a cached plan."""
    weight_files: frozenset[str] = frozenset()


def items(cache_dir: Path) -> list[CacheItem]:
    """Return plans, captures, what ranks keep, spilled weights, code and machine profiles, each newest first."""
    plans = [
        CacheItem(
            key=entry.key,
            kind=ItemKind.PLAN,
            label=entry.model,
            size_bytes=entry.size_bytes,
            age_s=entry.age_s,
            path=str(plan_cache.plans_dir(cache_dir) / entry.key),
            ok=entry.ok,
            weight_files=entry.weight_files,
        )
        for entry in plan_cache.entries(cache_dir)
    ]
    needed = _resolved(path for item in plans for path in item.weight_files)
    captures = [
        _file_item(path, ItemKind.CAPTURE, "captured program", ok=True)
        for path in captures_dir(cache_dir).glob("[0-9a-f]*")
    ]
    ranks = [
        _file_item(path, ItemKind.RANKS, label, ok=True)
        for beginning, label in _OF_RANKS.items()
        for path in (cache_dir / "ranks").glob(f"{beginning}-*.json")
    ]
    weights = [
        _file_item(path, ItemKind.WEIGHTS, "spilled weights", ok=str(path.resolve()) in needed)
        for path in (cache_dir / "store").glob("[!.]*.safetensors")
    ]
    machines = [
        _file_item(path, ItemKind.MACHINE, "machine profile", ok=True)
        for path in (cache_dir / "machine").glob("[!.]*.json")
    ]
    code = [
        _file_item(path, ItemKind.CODE, label, ok=True)
        for folder, label, files in (
            ("kernels", "fused kernels", "[!.]*.so"),
            ("native", "page memory", "pages*.so"),
            ("native", "products with packed weights", "wire*.so"),
        )
        for path in (cache_dir / folder).glob(files)
    ]
    every = (*captures, *ranks, *weights, *code, *machines)
    files = [item for item in every if item is not None]
    order = list(ItemKind)
    return [*plans, *sorted(files, key=lambda item: (order.index(item.kind), item.age_s))]


def select(items_at_hand: Iterable[CacheItem], prefixes: Iterable[str]) -> list[CacheItem]:
    """Return the items whose keys begin with ``prefixes``.

    Raises:
        ValueError: a prefix fits no key, or several.
    """
    known = list(items_at_hand)
    chosen: dict[str, CacheItem] = {}
    for prefix in prefixes:
        fitting = [item for item in known if prefix and item.key.startswith(prefix)]
        exact = [item for item in fitting if item.key == prefix]
        if len(exact or fitting) != 1:
            what = f"{len(fitting)} entries begin" if fitting else "no entry begins"
            raise ValueError(f"{what} with {prefix!r}; 'gascompile cache ls' lists the keys")
        item = (exact or fitting)[0]
        chosen[item.path] = item
    return list(chosen.values())


def remove(cache_dir: Path, chosen: Iterable[CacheItem]) -> None:
    """Remove items; one that is gone already counts as removed.

    Raises:
        StorageError: an item cannot be removed.
    """
    for item in chosen:
        if item.kind == ItemKind.PLAN:
            plan_cache.remove(cache_dir, item.key)
        elif item.kind == ItemKind.CODE:
            _remove_code(Path(item.path))
        else:
            with exclusive(cache_dir / "store" / ".lock"):
                _delete(Path(item.path))


def _remove_code(path: Path) -> None:
    for key in (path.parent / "keys").glob("*"):
        with contextlib.suppress(OSError, StorageError, FormatError):
            if read_regular(key, max_bytes=_KEY_BYTES) == path.stem.encode():
                _delete(key)
    _delete(path)
    _delete(path.with_suffix(".json"))


def collect(
    cache_dir: Path,
    *,
    older_than_s: float | None = None,
    max_size_bytes: int | None = None,
    keep_weights: bool = False,
) -> list[CacheItem]:
    """Remove what is of no use and return it.

    Damaged plans go, then plans, captures, what ranks keep and code written longer ago than ``older_than_s``, then the
    oldest of all but code until they, their weights and the machine profiles, which stay, take ``max_size_bytes``
    at most; with them the spilled weights that no cached plan needs, and what killed writers left behind. Plans of
    this cache compile their code again when they are used; bundles saved elsewhere run without it.

    Args:
        keep_weights: leave spilled weights alone; bundles saved elsewhere may refer to them.

    Raises:
        StorageError: something cannot be removed.
    """
    if not cache_dir.is_dir():
        return []
    all_items = items(cache_dir)
    plans = [item for item in all_items if item.kind == ItemKind.PLAN]
    others = [item for item in all_items if item.kind in {ItemKind.CODE, *_AGING}]
    old = [i for i in (*plans, *others) if older_than_s is not None and i.age_s > older_than_s]
    doomed = [*old, *(item for item in plans if not item.ok and item not in old)]
    aging = [item for item in others if item.kind in _AGING]
    kept = [item for item in (*plans, *aging) if item not in doomed]
    kept.sort(key=lambda item: item.age_s)
    while True:
        needed = _resolved(path for item in kept for path in item.weight_files)
        unused = [] if keep_weights else _unused_weights(all_items, needed)
        gone = {item.path for item in (*doomed, *unused)}
        left = (i for i in all_items if i.path not in gone and i.kind != ItemKind.CODE)
        left_bytes = sum(item.size_bytes for item in left)
        if max_size_bytes is None or left_bytes <= max_size_bytes or not kept:
            break
        doomed.append(kept.pop())
    leftovers = list(_leftovers(cache_dir))
    removed = [*doomed, *unused, *leftovers]
    remove(cache_dir, removed)
    return removed


def _unused_weights(all_items: Iterable[CacheItem], needed: frozenset[str]) -> list[CacheItem]:
    return [
        item
        for item in all_items
        if item.kind == ItemKind.WEIGHTS
        and item.age_s > GRACE_S
        and str(Path(item.path).resolve()) not in needed
    ]


def _resolved(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(str(Path(path).resolve()) for path in paths)


def _leftovers(cache_dir: Path) -> Iterator[CacheItem]:
    """Yield hidden temporary files and folders that their writers would have renamed long ago."""
    folders = [
        "plans",
        "captures",
        "ranks",
        "store",
        "kernels",
        "kernels/keys",
        "native",
        "machine",
    ]
    # Measurements of the drive write beside the folders.
    hidden = [("machine", cache_dir.glob(f"{PROBE_PREFIX}*"))]
    hidden += [(folder, (cache_dir / folder).glob(".*")) for folder in folders]
    for folder, paths in hidden:
        for path in paths:
            item = (
                None
                if path.name in {".lock", NOTES, tied.NOTES}
                else _file_item(path, ItemKind.LEFTOVER, folder, ok=False)
            )
            if item is not None and item.age_s > GRACE_S:
                yield item


def _file_item(path: Path, kind: ItemKind, label: str, *, ok: bool) -> CacheItem | None:
    try:
        stat = path.lstat()
        size_bytes = stat.st_size
        if path.is_dir():
            size_bytes = sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())
    except FileNotFoundError:
        return None
    return CacheItem(
        key=path.stem if kind != ItemKind.LEFTOVER else path.name,
        kind=kind,
        label=label,
        size_bytes=size_bytes,
        age_s=max(time.time() - stat.st_mtime, 0.0),
        path=str(path),
        ok=ok,
    )


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(
            f"cannot remove {path}: {error.strerror or error}; check its permissions"
        ) from error
