"""What ranks measure when they meet: all of them the same, whatever each of them has kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gascompile.core.errors import StorageError
from gascompile.core.ranks import RankLayout
from gascompile.distributed.ladder import Ladder, Rung
from gascompile.distributed.own_moves import OwnMoves
from gascompile.training import rank_network
from gascompile.training.rank_network import known_network

_RUNGS = tuple(Rung(size_bytes=1 << bits, time_s=1e-3) for bits in (12, 18, 22))
_UNASKED = Ladder(
    whole=_RUNGS, part=_RUNGS, gathers=_RUNGS, flows=_RUNGS, begins=_RUNGS, late=0.0, busy=0.5
)
_ASKED = replace(_UNASKED, moves_s_per_byte=1e-10)


class Ranks:
    """The first of two ranks, of which the other says ``other``."""

    def __init__(self, other: Sequence[int]) -> None:
        self.hosts, self.layout = ["host", "host"], RankLayout(rank=0, size=2)
        self.measured: list[bool] = []
        self.told: list[list[int]] = []
        self._other = list(other)

    def compare(self, what: str, facts: bytes, numbers: Sequence[int]) -> list[list[int]]:
        self.told = [list(numbers), self._other]
        return self.told

    def ladder(self, moves: OwnMoves | None) -> Ladder:
        self.measured.append(moves is not None)
        return _UNASKED if moves is None else _ASKED


def _known(folder: Path, other: Sequence[int], *, moves: bool = True) -> tuple[Ladder, Ranks]:
    ranks: Any = Ranks(other)
    return known_network(ranks, folder, None, moves=moves), ranks


def test_moves_are_measured_by_all_ranks_or_none(tmp_path: Path) -> None:
    # Neither the other, which has no room or does not move anything, nor this one.
    for moves, other in ((True, (0, 0, 1)), (False, (0, 1, 1))):
        found, ranks = _known(tmp_path / f"{moves}", other, moves=moves)
        assert (found, ranks.measured) == (_UNASKED, [False])
        assert ranks.told[0] == [0, int(moves), 1]
    found, ranks = _known(tmp_path, (0, 1, 1))
    assert (found, ranks.measured) == (_ASKED, [True])
    # Kept on both, it is not measured again; where the other has lost it, both do.
    found, ranks = _known(tmp_path, (0, 1, 0))
    assert (found, ranks.measured, ranks.told[0]) == (_ASKED, [False], [0, 1, 0])
    assert _known(tmp_path, (0, 1, 1))[1].measured == [True]


def test_ranks_that_are_started_again_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _known(tmp_path, (1, 0, 0))[1].measured == [False], "this one has kept nothing"
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    _known(tmp_path, (0, 1, 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found, ranks = _known(tmp_path, (1, 0, 0))
    assert (found, ranks.measured, ranks.told[0]) == (_ASKED, [], [1, 0, 0])
    # The other cannot go on by itself.
    assert _known(tmp_path, (0, 1, 1))[1].measured == [False]


def test_a_drive_without_room_is_no_reason_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(folder: Path, pages: object) -> OwnMoves:
        raise StorageError("no room")

    monkeypatch.setattr(rank_network, "OwnMoves", full)
    found, ranks = _known(tmp_path, (0, 1, 1))
    assert (found, ranks.measured, ranks.told[0]) == (_UNASKED, [False], [0, 0, 1])


def test_the_room_is_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[bool] = []
    own = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(rank_network, "OwnMoves", lambda *_: own)
    _known(tmp_path, (0, 1, 1))
    _known(tmp_path, (0, 0, 1))
    assert closed == [True, True]
