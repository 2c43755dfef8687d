"""What ops lose to moves of their own rank, on a clock that stands still but for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gascompile.core.errors import StorageError
from gascompile.distributed import own_moves
from gascompile.distributed.own_moves import OwnMoves

_OP_S, _CALL_S = 1e-4, 2e-3


def test_calls_and_threads_that_take_time_from_ops_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, met = [0.0], [0]
    monkeypatch.setattr(own_moves, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def run(count: int) -> None:
        clock[0] += count * _OP_S

    def seconds(count: int) -> float:
        run(count)
        return count * _OP_S

    def add(_: object) -> None:
        met[0] += 1

    moves = OwnMoves(tmp_path, None)
    read = moves._store.read

    def slow(name: str) -> Any:
        clock[0] += _CALL_S
        return read(name)

    monkeypatch.setattr(moves._store, "read", slow)
    ops: Any = SimpleNamespace(run=run, seconds=seconds)
    exchange: Any = SimpleNamespace(add=add)
    try:
        found = moves.lost_s_per_byte(exchange, ops)
    finally:
        moves.close()
    assert found == pytest.approx(_CALL_S / (2 * own_moves._BYTES))
    assert met == [2 * own_moves._REPEATS], "ranks begin together"


def test_a_folder_without_room_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        OwnMoves(tmp_path / "file", None)
