"""Rank sharing: which ranks have one folder, and who writes what of a checkpoint into it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gascompile.core.errors import StorageError
from gascompile.distributed.ranks import Ranks
from gascompile.runtime.memory.persistent import Persistent
from gascompile.training.state.tensor_files import Entry, Part, own_parts, whole_part
from gascompile.training.state.whole_checkpoints import PROBE

Agree = Callable[[str, Callable[[], Any]], list[Any]]
"""Does work for a topic on all ranks, and returns what it came to on each; all raise what one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Groups of ranks whose folders are one and the same, as each group sees it."""

    groups: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def own(self) -> tuple[int, ...]:
        """Return the ranks that have this one's folder."""
        return next(group for group in self.groups if self.rank in group)

    @property
    def is_first(self) -> bool:
        """Return whether this rank acts for its folder."""
        return self.own[0] == self.rank

    @property
    def share(self) -> int:
        """Return this rank's place among those of its folder."""
        return self.own.index(self.rank)

    @property
    def is_one(self) -> bool:
        """Return whether all ranks have the same folder."""
        return len(self.groups) == 1


def sharing_of(keys: Sequence[object], rank: int) -> Sharing:
    """Return the groups of ranks with equal ``keys``."""
    groups: dict[object, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return Sharing(groups=tuple(map(tuple, groups.values())), rank=rank)


def place_of(folder: Path) -> str:
    """Return what is equal where two ranks of a host have one folder; nothing where there is none."""
    try:
        stat = os.stat(folder)
    except OSError:
        return ""
    return f"{socket.gethostname()} {stat.st_dev} {stat.st_ino}"


class Probe:
    """A file by which ranks see who shares their folder, on whatever host and however it is mounted."""

    def __init__(self, folder: Path) -> None:
        """Name it."""
        self.name = f"{PROBE}{uuid.uuid4().hex}"
        self._folder = folder

    def put(self) -> str:
        """Make it, and return its name; raises ``OSError``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / self.name).touch()
        return self.name

    def seen(self, names: Iterable[str]) -> list[int]:
        """Return the ranks whose probes are in this folder."""
        return [rank for rank, name in enumerate(names) if (self._folder / name).exists()]

    def remove(self) -> None:
        """Take it away; a later save does, where that fails."""
        with contextlib.suppress(OSError):
            (self._folder / self.name).unlink()


def sharing_seen(seen: Sequence[Sequence[int]], rank: int, ranks: Ranks) -> Sharing:
    """Return the groups of ranks that see each other's probes.

    Raises:
        StorageError: one sees another that does not see it; on all ranks.
    """
    sharing = sharing_of([tuple(names) for names in seen], rank)
    if any(list(group) != list(seen[group[0]]) for group in sharing.groups):
        raise ranks.known(
            StorageError(
                f"ranks see each other's folders in part ({list(map(list, seen))}): give each host a folder of its "
                "own, or all of them one that shows what others write at once"
            )
        )
    return sharing


def owners(entries: Mapping[str, Entry], ranks: Sequence[int]) -> dict[str, int]:
    """Return who writes each tensor that is no part of one, so that all write about as much."""
    loads = dict.fromkeys(ranks, 0)
    owner_of, whole = {}, {}
    for name, entry in entries.items():
        if entry.owner is not None:
            owner_of[name] = entry.owner
            loads[entry.owner] = loads.get(entry.owner, 0) + entry.size_bytes
        elif not entry.own:
            whole[name] = entry.size_bytes
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        least = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[least] += whole[name]
        owner_of[name] = least
    return owner_of


def parts_of(
    entries: Mapping[str, Entry], owner: Mapping[str, int], rank: int, persistent: Persistent
) -> list[Part]:
    """Return what a rank writes: its parts of tensors of which each has some, and its tensors of the others."""
    parts = []
    for name, entry in entries.items():
        if entry.own:
            parts += own_parts(name, entry, persistent)
        elif owner[name] == rank:
            parts.append(whole_part(name, entry))
    return parts


def raised(work: Callable[[], object]) -> OSError | None:
    """Return what ``work`` raises: others wait for what comes after it."""
    try:
        work()
    except OSError as error:
        return error
    return None
