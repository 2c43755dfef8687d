"""Completing: how ranks with folders of their own find a checkpoint that they have together, and what one lacks of it.

A folder gets what it lacks from another, in the place that it would have had: under another name, and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gascompile.core.errors import CheckpointError
from gascompile.distributed.ranks import Ranks
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.state.pieces import tensor_bytes
from gascompile.training.state.rank_sharing import Agree, Sharing, place_of, raised, sharing_of
from gascompile.training.state.whole_checkpoints import (
    INCOMING,
    MANIFEST,
    damaged,
    digest_of,
    found_in,
    listed_in,
    sync_folder,
)

_CHUNK_BYTES = 4 << 20
"""Sent at once: what a rank takes of memory for a file that it sends or gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A checkpoint as this rank finds it in its folder."""

    folder: Path
    others: tuple[str, ...]
    """Names of older ones, the newest first."""
    sharing: Sharing
    lacked: tuple[frozenset[str], ...] = ()
    """By group of ranks with one folder: files that are not there, or others than were saved."""
    absent: tuple[bool, ...] = ()
    """By group: whether it has nothing of it."""

    @property
    def _group(self) -> int:
        return self.sharing.groups.index(self.sharing.own)

    @property
    def lacking(self) -> frozenset[str]:
        """Return what is not in this rank's folder."""
        return self.lacked[self._group] if self.lacked else frozenset()

    @property
    def is_absent(self) -> bool:
        """Return whether this rank's folder has nothing of it."""
        return bool(self.absent) and self.absent[self._group]


def look(folder: Path, rank: int, known: Sharing | None, agree: Agree) -> Here:
    """Return the newest checkpoint that is in a folder of any rank.

    Raises:
        CheckpointError: there is none; on all ranks.
    """
    own = [path.name for path in found_in(folder)]
    seen = agree("what is there", lambda: [place_of(folder), own])
    names = sorted({name for _, names in seen for name in names}, reverse=True)

    def require() -> None:
        if not names:
            raise CheckpointError(
                f"there is no checkpoint in {folder}; pass the folder that save was given"
            )

    agree("which one", require)
    sharing = known or sharing_of([place or number for number, (place, _) in enumerate(seen)], rank)
    return Here(folder=folder / names[0], others=tuple(names[1:]), sharing=sharing)


def verified(here: Here, agree: Agree) -> Here:
    """Return the newest checkpoint of which all files are somewhere, with what folders lack of it.

    Each rank looks at its share of the files of its folder.

    Raises:
        CheckpointError: there is none, or folders are of different runs; on all ranks.
    """
    name, share, of = here.folder.name, here.sharing.share, len(here.sharing.own)
    parts = agree(f"verifying {name}", partial(_own_part, here.folder, share, of))
    manifests = {digest for digest, _, _ in parts if digest}
    groups = here.sharing.groups
    absent = tuple(not parts[group[0]][0] for group in groups)
    every = {name for _, listed, _ in parts for name in listed}
    lacked = tuple(
        frozenset(every if gone else {name for rank in group for name in parts[rank][2]})
        for group, gone in zip(groups, absent, strict=True)
    )
    nowhere = frozenset.intersection(*lacked)
    if nowhere and any(absent) and here.others:
        # It was never whole: some folders had got their names when a rank ended.
        older = replace(here, folder=here.folder.with_name(here.others[0]), others=here.others[1:])
        return verified(older, agree)

    def require() -> None:
        if len(manifests) > 1:
            raise CheckpointError(
                f"the folders of ranks hold different checkpoints under the name {name}; take all from one run"
            )
        for file in sorted(nowhere):
            why = next((bad[file] for _, _, bad in parts if file in bad), "it is in no folder")
            raise CheckpointError(
                f"{here.folder / file} is damaged: {why}; take the folder from a backup"
            )

    agree(f"whether {name} is whole", require)
    return replace(here, lacked=lacked, absent=absent)


def _own_part(folder: Path, share: int, of: int) -> tuple[str, list[str], dict[str, str]]:
    """Return the digest of the manifest, what it lists, and what of this rank's share is damaged, and why."""
    if not folder.is_dir():
        return "", [], {}
    listed = sorted(listed_in(folder))
    return digest_of(folder / MANIFEST), listed, damaged(folder, share, of)


def completed(here: Here, ranks: Ranks, agree: Agree) -> Here:
    """Bring to each folder the files that it lacks, from one that has them, and return it with nothing lacking.

    Raises:
        RankError: a rank is gone.
        StorageError: one cannot be read or written; on all ranks.
    """
    transfer = _Transfer(here, ranks)
    agree("a folder for what comes", transfer.make)
    names = sorted(frozenset().union(*here.lacked))
    for name in [*names, *([MANIFEST] if any(here.absent) else [])]:
        sizes = agree(f"sending {name}", partial(transfer.size_bytes, name))
        agree(f"receiving {name}", partial(transfer.send, name, max(sizes)))
    agree("naming what came", transfer.end)
    return replace(here, lacked=(), absent=())


class _Transfer:
    """Files of a checkpoint on their way from folders that have them to those that do not."""

    def __init__(self, here: Here, ranks: Ranks) -> None:
        self._here, self._ranks = here, ranks
        self._rank = here.sharing.rank
        self._receives = here.sharing.is_first and bool(here.lacking or here.is_absent)
        self._folder = here.folder
        if here.is_absent:
            number = here.folder.name[-8:]
            self._folder = here.folder.with_name(f".writing-{number}-{uuid.uuid4().hex[:8]}")

    def make(self) -> None:
        if self._receives and self._here.is_absent:
            self._folder.mkdir(parents=True)

    def _lacking(self, group: int, name: str) -> bool:
        here = self._here
        return here.absent[group] if name == MANIFEST else name in here.lacked[group]

    def _source(self, name: str) -> int:
        """Return the rank that sends a file."""
        groups = enumerate(self._here.sharing.groups)
        return next(ranks[0] for group, ranks in groups if not self._lacking(group, name))

    def size_bytes(self, name: str) -> int:
        is_source = self._rank == self._source(name)
        return (self._here.folder / name).stat().st_size if is_source else 0

    def send(self, name: str, size_bytes: int) -> None:
        """Send a file to those that lack it; all ranks take part. Raises ``OSError`` once all is sent."""
        source = self._source(name)
        own = self._here.sharing.groups.index(self._here.sharing.own)
        receives = self._receives and self._lacking(own, name)
        incoming = self._folder / f"{INCOMING}{name}"
        file, error = -1, None
        try:
            try:
                if self._rank == source:
                    file = os.open(self._here.folder / name, os.O_RDONLY | os.O_CLOEXEC)
                elif receives:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                    file = os.open(incoming, flags, 0o666)
                    os.posix_fallocate(file, 0, size_bytes)
            except OSError as caught:
                error = caught
            for at in range(0, size_bytes, _CHUNK_BYTES):
                part = torch.empty(min(_CHUNK_BYTES, size_bytes - at), dtype=torch.uint8)
                if self._rank == source and error is None:
                    error = raised(partial(_read, file, part, at))
                self._ranks.send([part], source)
                if receives and error is None:
                    error = raised(partial(write_all, file, tensor_bytes(part), at))
            if error is not None:
                raise error
            if receives:
                os.fsync(file)
                os.rename(incoming, self._folder / name)
        finally:
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):
                incoming.unlink()

    def end(self) -> None:
        """Compare what came with the manifest, and give a folder its name; raises ``OSError``."""
        if not self._receives:
            return
        names = self._here.lacking
        bad = {name: why for name, why in damaged(self._folder).items() if name in names}
        if bad:
            raise OSError(errno.EIO, f"{next(iter(bad))} did not come as it was saved")
        sync_folder(self._folder)
        if self._here.is_absent:
            os.rename(self._folder, self._here.folder)
            sync_folder(self._here.folder.parent)


def _read(file: int, into: torch.Tensor, at: int) -> None:
    target, done = tensor_bytes(into), 0
    while done < len(target):
        got = os.preadv(file, [target[done:]], at + done)
        if got <= 0:
            raise OSError(errno.EIO, "the file ends before it was sent")
        done += got
