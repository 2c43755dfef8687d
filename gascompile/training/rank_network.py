"""Rank network: what exchanges between ranks take, and what ops lose to moves, as plans are made with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.distributed.ladder import Ladder
from gascompile.distributed.own_moves import OwnMoves
from gascompile.distributed.ranks import Ranks
from gascompile.runtime.memory.pages import Pages


def known_network(ranks: Ranks, cache_dir: Path, pages: Pages | None, *, moves: bool) -> Ladder:
    """Return what exchanges take: what was found before, where that still holds. All ranks call it.

    Ranks that torchrun starts again measure nothing: they go on with what their job has measured, and so with the
    plans that it has made. Each agent of torchrun counts the restarts of its own ranks.

    Args:
        ranks: of the job.
        cache_dir: where it is kept; see ``Ladder.as_kept``.
        pages: where large values lie.
        moves: whether this processor moves them.

    Raises:
        RankError: a rank has failed.
        StorageError: the drive of ``cache_dir`` fails.
    """
    name = serial.digest([ranks.hosts, ranks.layout.rank])[:16]
    path = cache_dir / "ranks" / f"exchanges-{name}.json"
    before = Ladder.kept(path)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    can_go_on = again and before is not None
    # What moves take from ops hangs on this host alone, and is not measured again.
    lacks = before is None or before.moves_s_per_byte is None
    with _own_moves(cache_dir, pages, asked=moves and not can_go_on) as own:
        numbers = [int(can_go_on), int(own is not None), int(lacks)]
        told = ranks.compare("what exchanges took", b"", numbers)
        all_go_on, all_move, all_lack = zip(*told, strict=True)
        if before is not None and all(all_go_on):
            return before
        is_asked = all(all_move) and any(all_lack)
        # In the memory that steps have.
        with pages.active(0) if pages else contextlib.nullcontext():
            ladder = ranks.ladder(own if is_asked else None)
        if pages is not None:
            pages.trim()
    return ladder.as_kept(path)


@contextlib.contextmanager
def _own_moves(cache_dir: Path, pages: Pages | None, *, asked: bool) -> Iterator[OwnMoves | None]:
    """Yield what moves are measured with, unless there is no room for it: steps of small models take less."""
    own = None
    if asked:
        with contextlib.suppress(StorageError):
            own = OwnMoves(cache_dir / "training", pages)
    try:
        yield own
    finally:
        if own is not None:
            own.close()
