"""Kept plans of a pipeline's stages: the one that was made of the same, and none that a file only claims to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gascompile.core.plan import Plan
from gascompile.training.pipeline.kept_plans import kept_plan
from tests.cost_models.hand_plans import streaming


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[Plan, str], bool]:
    """Return what asks for a plan made of its workload and a word, and tells whether it was made anew."""

    def ask(plan: Plan, word: str) -> bool:
        made: list[Plan] = []

        def make() -> Plan:
            made.append(plan)
            return plan

        found = kept_plan(tmp_path, plan.workload, [word], make)
        assert found == plan
        return bool(made)

    return ask


def test_it_is_made_once(asked: Callable[[Plan, str], bool]) -> None:
    plan = streaming()
    assert [asked(plan, "memory"), asked(plan, "memory"), asked(plan, "other memory")] == [
        True,
        False,
        True,
    ]


def test_a_file_under_the_name_of_another_is_none(
    asked: Callable[[Plan, str], bool], tmp_path: Path
) -> None:
    slow, fast = streaming(op_s=2.0), streaming(op_s=1.0)
    assert asked(slow, "memory")
    (first,) = (tmp_path / "ranks").iterdir()
    assert asked(fast, "memory")
    (second,) = set((tmp_path / "ranks").iterdir()) - {first}
    shutil.copyfile(first, second)
    assert asked(fast, "memory")
    assert not asked(slow, "memory")
    assert not asked(fast, "memory")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_cut_file_is_none(
    asked: Callable[[Plan, str], bool], tmp_path: Path, part: float
) -> None:
    plan = streaming()
    assert asked(plan, "memory")
    (path,) = (tmp_path / "ranks").iterdir()
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * part)])
    assert asked(plan, "memory")
    assert path.read_bytes() == text


def test_without_a_place_it_is_made_each_time(
    asked: Callable[[Plan, str], bool], tmp_path: Path
) -> None:
    (tmp_path / "ranks").write_text("a file in the place of the folder")
    assert asked(streaming(), "memory")
    assert asked(streaming(), "memory")
