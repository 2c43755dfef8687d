"""The choice of what ranks divide, by made-up plans of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gascompile.core.errors import InfeasiblePlanError, RankError
from gascompile.training import division

SIZES = {"small": 1 << 16, "large": 1 << 20, "medium": 1 << 19}
Times = Callable[[Mapping[str, str]], float | None]
"""Seconds of a step, by its division; ``None`` where nothing fits."""


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests of ranks in this process may have forced a division.
    monkeypatch.setattr(division, "forced", None)


class Job:
    """Two ranks, of which the first one asks."""

    def __init__(self, own: Times, other: Times, path: Path = Path("/dev/null/division")) -> None:
        self.own, self.other, self.path = own, other, path
        self.tried: list[dict[str, str]] = []
        self.other_knows = True
        """The same that the first rank knows of an earlier job."""
        self.saved_s: tuple[float, float] = 0.0, 0.0
        """By each rank, where gradients are summed beside ops."""
        self.is_beside = False

    def attempt(self, stages: Mapping[str, str], beside: bool) -> Any:
        self.tried.append(dict(stages))
        self.is_beside = beside
        time_s = self.own(stages)
        if time_s is not None and beside:
            time_s -= self.saved_s[0]
        if time_s is None:
            raise InfeasiblePlanError(required_bytes=2, limit_bytes=1, tier="cpu", op="one")
        plan = SimpleNamespace(certificate=SimpleNamespace(predicted_s=time_s))
        return dict(stages), SimpleNamespace(plan=plan)

    def compare(self, what: str, facts: bytes, numbers: Sequence[int]) -> list[list[int]]:
        if not numbers:
            raise RankError("rank 1 has failed", rank=1)
        if "before" in what:
            return [list(numbers), list(numbers) if self.other_knows else [-1]]
        time_s = self.other(self.tried[-1])
        if time_s is None:
            return [list(numbers), [0, 0]]
        time_s -= self.saved_s[1] * self.is_beside
        gains = int(not self.is_beside and self.saved_s[1] > 0)
        return [list(numbers), [round(time_s * 1e6), gains]]

    def divide(self) -> division.RankDivision:
        made: Any = division.divide(
            self.attempt,
            SIZES,
            self.compare,
            path=self.path,
            gains=lambda _: self.saved_s[0] > 0,
        )
        place, _, found = made
        assert place == found.chosen.stages
        return cast(division.RankDivision, found)


def at(whole: float | None, kept: float | None, again: float | None, half: float | None) -> Times:
    """Halves take as long in either way."""

    def times(stages: Mapping[str, str]) -> float | None:
        if stages and len(stages) < len(SIZES):
            return half
        return {"": whole, "kept": kept, "again": again}[next(iter(stages.values()), "")]

    return times


TRIED = [
    {},
    dict.fromkeys(SIZES, "kept"),
    dict.fromkeys(SIZES, "again"),
    {"large": "kept"},
    {"large": "again"},
]


@pytest.mark.parametrize("times", [at(1.0, 0.91, 1.1, 1.2), at(4e-3, 3.2e-3, 5e-3, 4e-3)])
def test_whole_parameters_stay_where_nothing_is_faster(times: Times) -> None:
    job = Job(times, times)
    assert not job.divide().chosen.stages
    assert job.tried == TRIED


def test_more_memory_is_never_a_slower_step() -> None:
    # With less memory whole parameters wait for moves; with more they do not, and a division is still the faster.
    less, more = at(1.22, 0.98, 0.99, 1.0), at(1.2, 0.98, 0.99, 0.99)
    times_s = [Job(memory, memory).divide().chosen.time_s for memory in (less, more)]
    assert times_s == pytest.approx([0.98, 0.98], rel=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_slowest_rank_decides(*, is_first: bool) -> None:
    slow, fast = at(3.0, 2.0, 1.5, 1.7), at(1.0, 1.2, 1.4, 1.3)
    job = Job(slow, fast) if is_first else Job(fast, slow)
    found = job.divide()
    assert found.chosen.stages == dict.fromkeys(SIZES, "again")
    assert (found.chosen.time_s, found.whole.time_s) == pytest.approx((1.5, 3.0), rel=1e-5)
    assert job.tried == TRIED


@pytest.mark.parametrize("other_knows", [True, False])
def test_the_next_job_plans_what_all_ranks_have_chosen_alone(
    tmp_path: Path, *, other_knows: bool
) -> None:
    times = at(3.0, 2.0, 1.5, 1.7)
    found = Job(times, times, tmp_path / "ranks" / "division").divide()
    job = Job(times, times, tmp_path / "ranks" / "division")
    job.other_knows = other_knows
    assert job.divide() == found
    assert job.tried == ([dict.fromkeys(SIZES, "again")] if other_knows else TRIED)
    assert str(found).startswith("each rank keeps a part of 3 parameters")


@pytest.mark.parametrize(("was", "now"), [("}", ""), ("1048576", "1048577"), ('"again"', '"else"')])
def test_a_choice_that_is_no_use_is_made_again(tmp_path: Path, was: str, now: str) -> None:
    times, path = at(3.0, 2.0, 1.5, 1.7), tmp_path / "division"
    Job(times, times, path).divide()
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))
    job = Job(times, times, path)
    job.divide()
    assert job.tried == TRIED


def test_what_one_rank_has_no_budget_for_is_none_of_the_others() -> None:
    found = Job(at(None, 2.0, None, 1.8), at(1.0, 1.0, 1.0, 1.0)).divide()
    assert found.chosen.stages == {"large": "kept"}
    assert "with whole parameters, which a rank has no budget for" in str(found)


def test_a_budget_that_fits_nothing_is_refused_by_its_own_rank() -> None:
    nothing, enough = at(None, None, None, None), at(1.0, 1.0, 1.0, 1.0)
    with pytest.raises(InfeasiblePlanError):
        Job(nothing, enough).divide()
    with pytest.raises(RankError):
        Job(enough, nothing).divide()


@pytest.mark.parametrize(
    ("saved_s", "is_beside"),
    [((0.3, 0.1), True), ((0.1, 0.3), True), ((0.0, 0.0), False), ((0.3, 0.0), False)],
)
def test_ranks_sum_gradients_beside_ops_together_or_not_at_all(
    saved_s: tuple[float, float], *, is_beside: bool
) -> None:
    # The slower second rank decides, and nothing is faster divided.
    job = Job(at(0.9, 0.9, 0.9, 0.9), at(1.0, 1.0, 1.0, 1.0))
    job.saved_s = saved_s
    found = job.divide()
    assert found.chosen.beside == is_beside
    wanted_s = max(0.9 - saved_s[0], 1.0 - saved_s[1]) if is_beside else 1.0
    assert found.chosen.time_s == pytest.approx(wanted_s, rel=1e-5)
    assert found.num_tried == len(TRIED) - 1
    assert not found.chosen.stages
