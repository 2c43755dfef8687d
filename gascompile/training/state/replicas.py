"""Replicas: what each rank has written of a checkpoint, once more in the folder of another rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.sizes import format_size
from gascompile.distributed.ranks import Ranks
from gascompile.runtime.transfer.copying import read_all, write_all
from gascompile.training.state.pieces import tensor_bytes
from gascompile.training.state.rank_sharing import Agree, Sharing, raised

_CHUNK_BYTES = 4 << 20  # of one message
Sizes = Sequence[Sequence[Any]]
"""Names and bytes of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCost:
    """What a save with ``replicas=2`` takes on this rank beyond one without."""

    size_bytes: int
    """That it sends; it receives and writes about as much."""
    time_s: float
    """Predicted, by what exchanges take and the drive's bandwidth."""

    def __str__(self) -> str:
        """Say it in a few words."""
        return f"{format_size(self.size_bytes)} more sent and written, about {self.time_s:.2f} s"


def require_folders(sharing: Sharing, folder: Path, ranks: Ranks) -> None:
    """Refuse replicas where they would lie beside what they are of; on all ranks.

    Raises:
        UnsupportedOpError: all ranks share one folder.
    """
    if sharing.is_one:
        said = (
            f"replicas=2 keeps what a rank writes in another rank's folder, too, and all ranks share {folder}: pass a "
            "folder on each host's own drive, or leave replicas out"
        )
        raise ranks.known(UnsupportedOpError(said))


def target_of(rank: int, sharing: Sharing, hosts: Sequence[str]) -> int:
    """Return who keeps a copy of what ``rank`` writes: of the next folder, on another host where there is one."""
    groups = sharing.groups
    number = next(n for n, group in enumerate(groups) if rank in group)
    others = [*groups[number + 1 :], *groups[:number]]
    afar = [group for group in others if hosts[group[0]] != hosts[rank]]
    chosen = (afar or others)[0]
    return chosen[groups[number].index(rank) % len(chosen)]


def replicate(
    folder: Path, files: dict[str, int], sharing: Sharing, ranks: Ranks, agree: Agree
) -> None:
    """Send this rank's files to another rank, and write those of the ranks that this one keeps copies of.

    Args:
        folder: of the checkpoint, which is not whole yet.
        files: descriptors of this rank's files by name; those of copies are put there.
        sharing: who has which folder.
        ranks: of the job.
        agree: votes.

    Raises:
        RankError: a rank is gone.
        StorageError: a file cannot be read or written; on all ranks.
    """
    own = [name for name in sorted(files) if "-of-" in name]
    told: list[Sizes] = agree(
        "what is copied", lambda: [[name, os.fstat(files[name]).st_size] for name in own]
    )
    rank = ranks.layout.rank
    targets = [target_of(r, sharing, ranks.hosts) for r in range(ranks.layout.size)]
    given = [sizes for sizes, target in zip(told, targets, strict=True) if target == rank]
    agree("room for copies", partial(_opened, folder, files, given))
    agree("copying", partial(_traded, files, targets, [_chunks(sizes) for sizes in told], ranks))


def _opened(folder: Path, files: dict[str, int], given: Sequence[Sizes]) -> None:
    for name, size_bytes in (pair for sizes in given for pair in sizes):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        files[name] = os.open(folder / name, flags, 0o666)
        os.posix_fallocate(files[name], 0, size_bytes)


def _chunks(sizes: Sizes) -> list[tuple[str, int, int]]:
    """Return the name, first byte and number of bytes of each chunk of files."""
    return [
        (name, at, min(_CHUNK_BYTES, size_bytes - at))
        for name, size_bytes in sizes
        for at in range(0, size_bytes, _CHUNK_BYTES)
    ]


def _traded(
    files: Mapping[str, int],
    targets: Sequence[int],
    chunks: Sequence[Sequence[tuple[str, int, int]]],
    ranks: Ranks,
) -> None:
    """Send and receive chunk by chunk; raises ``OSError`` once all are through, as others wait for them.

    Args:
        files: descriptors by name.
        targets: who gets what each rank sends.
        chunks: of each rank.
        ranks: of the job.
    """
    failed: OSError | None = None
    rank, every = ranks.layout.rank, range(len(chunks))
    for number in range(max(map(len, chunks))):
        now = [own[number] if number < len(own) else ("", 0, 0) for own in chunks]
        name, at, count = now[rank]
        sent = torch.empty(count, dtype=torch.uint8)
        failed = raised(partial(_read, files, name, at, sent)) or failed
        sizes = [now[source][2] if targets[source] == rank else 0 for source in every]
        to = [count if other == targets[rank] else 0 for other in every]
        parts = ranks.trade(sent, to, sizes).split(sizes)
        for source in every:
            name, at, _ = now[source]
            if sizes[source]:
                part = tensor_bytes(parts[source])
                failed = raised(partial(write_all, files[name], part, at)) or failed
    if failed is not None:
        raise failed


def _read(files: Mapping[str, int], name: str, at: int, into: torch.Tensor) -> None:
    if into.numel():
        read_all(files[name], tensor_bytes(into), into.numel(), at, _pread)


def _pread(file: int, into: memoryview, offset: int) -> int:
    return os.preadv(file, [into], offset)
