"""Rows per rank: what is optimal by enumeration, and when rows change."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.ranks import RankLayout
from gascompile.distributed.balance import Balance, divided
from gascompile.distributed.ladder import Rung, interpolated
from gascompile.distributed.rows import RowSampler, num_rows


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(min_value=4, max_value=9)
)
def test_the_slowest_rank_is_as_early_as_can_be(speeds: list[float], total: int) -> None:
    def time_s(rows: tuple[int, ...] | list[int]) -> float:
        return max(count / speed for count, speed in zip(rows, speeds, strict=True))

    every = itertools.product(range(1, total + 1), repeat=len(speeds))
    best = min(time_s(rows) for rows in every if sum(rows) == total)
    found = divided(total, speeds)
    assert sum(found) == total
    assert min(found) >= 1
    assert time_s(found) == pytest.approx(best)


def test_rows_follow_a_rank_that_slows_down_after_three_steps() -> None:
    balance = Balance([16, 16])
    for _ in range(20):
        assert not balance.learn([1.60, 1.66], balance.rows)
    changed = []
    for step in range(10):
        times_s = [0.109 * balance.rows[0], 0.231 * balance.rows[1]]
        if balance.learn(times_s, balance.rows):
            changed.append(step)
    # What steps took before it slowed down counts for nothing: 21 rows would be 6 % slower.
    assert balance.rows == [22, 10]
    assert changed == [2]


def test_steps_that_one_rank_was_disturbed_in_change_nothing() -> None:
    balance = Balance([8, 8])
    for step in range(12):
        # Two in a row, then one in peace.
        assert not balance.learn([0.8, 0.8 if step % 3 == 2 else 1.9], balance.rows)
    # Of three that agree the middle one counts.
    for slow_s in (1.6, 9.0, 1.6):
        balance.learn([0.8, slow_s], [8, 8])
    assert balance.rows == [11, 5]


def test_who_takes_the_rows_that_they_had_is_given_the_same_again() -> None:
    balance = Balance([8, 8])
    for _ in range(12):
        balance.learn([0.8, 1.6], [8, 8])
    assert balance.rows == [11, 5]


@given(st.integers(1, 6), st.integers(0, 1 << 16), st.integers(0, 1 << 20))
def test_parts_cover_a_range_once(size: int, begin: int, count: int) -> None:
    layouts = [RankLayout(rank=rank, size=size) for rank in range(size)]
    parts = [layout.own(begin, begin + count) for layout in layouts]
    assert [parts[0][0], *(end for _, end in parts)] == list(
        layouts[0].bounds(begin, begin + count)
    )
    assert sum(end - first for first, end in parts) == count
    assert all(first <= end for first, end in parts)


def test_what_has_no_rows_is_refused() -> None:
    assert num_rows({"x": torch.zeros(3, 2), "y": torch.zeros(3), "scale": torch.zeros(())}) == 3
    without: list[list[torch.Tensor]] = [[], [torch.zeros(3), torch.zeros(2)]]
    for batch in without:
        with pytest.raises(UnsupportedOpError, match="rows='equal'"):
            num_rows(batch)


def test_samplers_of_all_ranks_take_each_batch_apart() -> None:
    rows = [3, 1]
    samplers = [RowSampler(17, lambda: rows, rank) for rank in range(2)]
    seen: list[int] = []
    for batches in zip(*samplers, strict=True):
        assert [len(batch) for batch in batches] == rows
        seen += itertools.chain.from_iterable(batches)
    assert len(seen) == len(set(seen)) == 16
    again = list(samplers[0])
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != again


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24))
def test_larger_exchanges_take_no_less(first: int, second: int) -> None:
    found = [(1 << 12, 1e-3), (1 << 18, 2e-3), (1 << 22, 9e-3)]
    rungs = [Rung(size_bytes=size_bytes, time_s=time_s) for size_bytes, time_s in found]
    small, large = sorted((first, second))
    assert interpolated(rungs, small) <= interpolated(rungs, large)
