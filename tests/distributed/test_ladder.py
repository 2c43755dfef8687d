"""What exchanges take by a ladder that is climbed on a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gascompile.distributed import ladder


def _climbed(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, start_s: float) -> ladder.Ladder:
    """Return the ladder of a network that takes a while to start and is twice as fast with parts."""
    clock = [0.0]

    def whole(values: torch.Tensor) -> None:
        clock[0] += start_s + values.nbytes / bytes_per_s

    def part(values: torch.Tensor, sizes: list[int]) -> None:
        assert sum(sizes) == values.numel()
        clock[0] += start_s + values.nbytes / bytes_per_s / 2

    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    exchange = SimpleNamespace(size=3, add=whole, add_part=part)
    return ladder.Ladder(cast(Any, exchange))


@pytest.mark.parametrize("size_bytes", [4 << 10, 100_000, 1 << 20, 4 << 20])
def test_seconds_between_the_rungs_are_those_of_the_network(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    found = _climbed(monkeypatch, 1e8, 1e-3)
    assert found.seconds(size_bytes, divided=False) == pytest.approx(1e-3 + size_bytes / 1e8)
    assert found.seconds(size_bytes, divided=True) == pytest.approx(1e-3 + size_bytes / 2e8)


def test_beyond_the_last_rung_seconds_grow_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _climbed(monkeypatch, 1e8, 0.0)
    assert found.seconds(64 << 20, divided=False) == pytest.approx((64 << 20) / 1e8)


def test_plans_hold_for_networks_of_one_grade(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [100e6, 110e6, 400e6, 25e6]
    grades = [_climbed(monkeypatch, rate, 0.0).grade for rate in rates]
    assert grades[0] == grades[1]
    assert len(set(grades)) == 3
