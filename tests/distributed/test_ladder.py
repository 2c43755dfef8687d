"""What exchanges take by a ladder that is climbed on a clock of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gascompile.distributed import beside, ladder

_COPY_S, _LOST, _LATE = 2e-4, 0.25, 0.125
"""What it takes to begin a sum, the share of it that ops beside it lose, and by what share of ops others come late."""
_FLOWS, _MOVES = 0.5, 3e-10
"""The share of its time that a sum takes behind one that is under way, and what ops lose to each byte that moves."""


def _climbed(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, start_s: float, *, reads: bool = False
) -> ladder.Ladder:
    """Return the ladder of a network that takes a while to start and is faster with parts, and with gathers."""
    clock, flying, since = [0.0], [0.0], [0.0]

    def seconds(values: torch.Tensor, faster: float) -> float:
        return start_s + values.nbytes / bytes_per_s / faster

    def whole(values: torch.Tensor) -> None:
        clock[0] += seconds(values, 1.0)
        since[0] = 0.0

    def part(values: torch.Tensor, sizes: list[int]) -> None:
        assert sum(sizes) == values.numel()
        clock[0] += seconds(values, 2.0) + _LATE * since[0]
        since[0] = 0.0

    def gather(values: torch.Tensor, sizes: list[int]) -> None:
        assert sum(sizes) == values.numel()
        clock[0] += seconds(values, 4.0)

    def begin(values: torch.Tensor, sizes: list[int]) -> None:
        clock[0] += _COPY_S
        flying[0] += seconds(values, 2.0) * (_FLOWS if flying[0] else 1.0)

    def end() -> None:
        clock[0] += flying[0]
        flying[0] = 0.0

    def ops(_: object, count: int) -> None:
        clock[0] += 1e-3 * count + _LOST * flying[0]
        since[0] += 1e-3 * count
        flying[0] = 0.0

    for module in (ladder, beside):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(beside.Ops, "run", ops)
    exchange = SimpleNamespace(
        reads=reads,
        size=3,
        rank=1,
        add=whole,
        add_part=part,
        gather=gather,
        begin_part=begin,
        end_part=end,
    )
    moves = SimpleNamespace(lost_s_per_byte=lambda *_: _MOVES)
    return ladder.Ladder.measured(cast(Any, exchange), cast(Any, moves))


@pytest.mark.parametrize("size_bytes", [4 << 10, 100_000, 1 << 20, 4 << 20])
def test_seconds_between_the_rungs_are_those_of_the_network(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    found = _climbed(monkeypatch, 1e8, 1e-3)
    assert found.seconds(size_bytes, divided=False) == pytest.approx(1e-3 + size_bytes / 1e8)
    assert found.seconds(size_bytes, divided=True) == pytest.approx(1e-3 + size_bytes / 2e8)
    assert found.gather_s(size_bytes) == pytest.approx(1e-3 + size_bytes / 4e8)


def test_ops_lose_what_they_lost_beside_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _climbed(monkeypatch, 1e8, 1e-3)
    assert found.busy == pytest.approx(_LOST)
    assert found.begin_s(1 << 20) == pytest.approx(_COPY_S)


def test_several_that_are_under_way_take_less_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _climbed(monkeypatch, 1e8, 1e-3)
    alone_s = 1e-3 + (1 << 20) / 2e8
    assert found.flow_s(1 << 20) == pytest.approx(_COPY_S + alone_s * (1 + 3 * _FLOWS) / 4)
    # Ranks that read each other's memory do so one after the other.
    reads = _climbed(monkeypatch, 1e8, 1e-3, reads=True)
    assert reads.flow_s(1 << 20) == pytest.approx(alone_s)
    assert found.moves_s_per_byte == _MOVES


def test_ranks_wait_for_whoever_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _climbed(monkeypatch, 1e8, 1e-3).late == pytest.approx(_LATE)


def test_beyond_the_last_rung_seconds_grow_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _climbed(monkeypatch, 1e8, 0.0)
    assert found.seconds(64 << 20, divided=False) == pytest.approx((64 << 20) / 1e8)


def test_what_was_measured_first_is_kept_while_the_network_is_as_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ranks" / "exchanges.json"
    rates = (100e6, 110e6, 60e6, 140e6, 25e6)
    first, like, busy, faster, slow = (_climbed(monkeypatch, rate, 0.0) for rate in rates)
    assert first.as_kept(path) == first
    assert like.as_kept(path) == first
    assert busy.as_kept(path) == first
    # Again, as what is compared with does not creep.
    assert like.as_kept(path) == first
    # The first may have been measured while the hosts were busy.
    assert faster.as_kept(path) == faster
    assert slow.as_kept(path) == slow
    assert faster.as_kept(path) == faster


def test_what_moves_cost_is_kept_where_nobody_has_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "exchanges.json"
    first, slow = (_climbed(monkeypatch, rate, 0.0) for rate in (100e6, 25e6))
    unasked = replace(first, moves_s_per_byte=None)
    assert unasked.as_kept(path) == unasked
    # It is written down once it is known, though the network is as before.
    assert first.as_kept(path) == first
    assert unasked.as_kept(path) == first
    assert replace(slow, moves_s_per_byte=None).as_kept(path) == slow
    assert ladder.Ladder.kept(path) == slow


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"whole":[],"part":[]}',
        b'{"whole":[{"size_bytes":4194304,"time_s":0.0}],"part":[{"size_bytes":4194304,"time_s":0.0}]}',
        b'{"whole":[{"size_bytes":9,"time_s":1.0}],"part":[],"gathers":[],"flows":[],"begins":[]}',
    ],
)
def test_what_cannot_be_used_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "exchanges.json"
    path.write_bytes(content)
    found = _climbed(monkeypatch, 100e6, 0.0)
    assert found.as_kept(path) == found
    assert _climbed(monkeypatch, 110e6, 0.0).as_kept(path) == found


def test_a_folder_that_cannot_be_written_to_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ranks").write_text("a file")
    found = _climbed(monkeypatch, 100e6, 0.0)
    assert found.as_kept(tmp_path / "ranks" / "exchanges.json") == found
