"""Rows per rank: what is optimal by enumeration, and when rows change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.ranks import RankLayout
from gascompile.distributed.balance import Balance, divided
from gascompile.distributed.ladder import Rung, interpolated
from gascompile.distributed.rows import RowSampler, num_rows
from gascompile.training.rank_step import RankStep


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


def _steps_until(balance: Balance, wanted: list[int], row_s: list[float], steps: int) -> int | None:
    """Return after how many steps, of so many seconds a row, rows were those wanted; they are so at the end."""
    for step in range(steps):
        times_s = [time_s * count for time_s, count in zip(row_s, balance.rows, strict=True)]
        balance.learn(times_s, balance.rows)
        if balance.rows == wanted:
            return step + 1
    return None


def test_a_row_too_many_on_half_a_core_is_seen_by_more_steps_and_within_ten_of_slowing() -> None:
    balance = Balance([18, 18])
    # As measured while one rank's core was taken: a little less than twice as slow, then a little more.
    assert _steps_until(balance, [24, 12], [0.38, 0.76], 3) == 3
    assert _steps_until(balance, [25, 11], [0.362, 0.804], 10) == 5
    # It was worth it, and is as good as it gets: nothing changes any more.
    assert _steps_until(balance, [24, 12], [0.362, 0.804], 40) is None
    assert balance.rows == [25, 11]


def test_small_changes_that_did_not_make_steps_shorter_are_taken_back_for_good() -> None:
    balance = Balance([24, 12])
    assert _steps_until(balance, [25, 11], [0.362, 0.804], 6) == 5
    # The plan for other rows may be a slower one: here steps take what they took, or more.
    assert _steps_until(balance, [24, 12], [0.39, 0.80], 6) == 5
    assert _steps_until(balance, [25, 11], [0.362, 0.804], 60) is None
    # Until one is much slower.
    assert _steps_until(balance, [28, 8], [0.3, 1.0], 3) == 3
    assert _steps_until(balance, [27, 9], [0.3, 0.88], 6) == 5


def test_small_steps_are_not_planned_anew_for_a_small_gain_before_they_took_half_a_minute() -> None:
    balance = Balance([24, 12])
    assert _steps_until(balance, [25, 11], [0.00362, 0.00804], 1000) == 311  # of 0.0965 s
    assert _steps_until(balance, [24, 12], [0.00362, 0.00804], 1000) is None


def test_one_step_of_five_may_be_disturbed_and_two_may_not() -> None:
    for disturbed, wanted in ((1, [25, 11]), (2, [24, 12])):
        balance = Balance([24, 12])
        for step in range(5):
            row_s = [0.45, 0.804] if step < disturbed else [0.362, 0.804]
            balance.learn([24 * row_s[0], 12 * row_s[1]], [24, 12])
        assert balance.rows == wanted


@given(st.integers(0, 1 << 30), st.floats(0.4, 2.5))
def test_noise_leaves_rows_near_the_best(seed: int, slower: float) -> None:
    draw = random.Random(seed)
    balance = Balance([16, 16])
    changes = 0
    for _ in range(120):
        times_s = [
            own * time_s * draw.lognormvariate(0, 0.03)
            for own, time_s in zip(balance.rows, (0.5, 0.5 * slower), strict=True)
        ]
        changes += balance.learn(times_s, balance.rows)

    def step_s(rows: list[int]) -> float:
        return max(rows[0], rows[1] * slower)

    best = min(step_s([count, 32 - count]) for count in range(1, 32))
    assert step_s(balance.rows) <= 1.08 * best
    assert changes <= 10


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


def test_one_batch_of_another_size_is_what_an_epoch_leaves() -> None:
    step = object.__new__(RankStep)
    vars(step).update(_balance=None, _last_rows=[])
    seen = []
    for rows in ([6, 3], [6, 3], [1, 1], [6, 3], [6, 3], [4, 4], [4, 4]):
        step._learn(rows, [1.0, 1.0])
        seen.append(sum(step._balance.rows) if step._balance else 0)
    assert seen == [9, 9, 9, 9, 9, 9, 8]
