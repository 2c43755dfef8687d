"""The benchmark of ranks at toy size: one of its parts, its limits, and how results come together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ranks import equal, limits, parts, unequal
from benchmarks.ranks.__main__ import main
from benchmarks.ranks.restarts import Line, lines_of
from tests.training.trials import MACHINE

needs_limits = pytest.mark.skipif(bool(limits.missing()), reason="no control groups can be made")


@needs_limits
def test_a_part_says_what_was_asked_and_is_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal, "MODELS", ("convnet",))
    monkeypatch.setitem(equal._ROWS, 2, ([8, 4],))
    output = tmp_path / "ranks.json"
    output.write_text(json.dumps({"parts": {"drives": {"rows": []}}}))
    given = ["--machine", MACHINE, "--scratch", str(tmp_path), "-o", str(output)]
    assert main(["equal", "--toy", *given]) == 0
    found = json.loads(output.read_text())
    assert found["parts"].keys() == {"drives", "equal"}
    (row,) = found["parts"]["equal"]["rows"]
    assert row["rows"] == [8, 4]
    assert len(row["_losses"]) == 3
    assert row["same_bits"]
    assert all(check["met"] for check in found["parts"]["equal"]["checks"])
    assert [path.name for path in tmp_path.iterdir()] == ["ranks.json"]


@needs_limits
def test_limits_are_the_kernels_and_go_with_their_block() -> None:
    held = limits.Confined(limits.Limits(cores=0.5, memory_bytes=1 << 28))
    group = Path(held.cpu_group)
    assert int((group / "cpu.cfs_quota_us").read_text()) * 2 == int(
        (group / "cpu.cfs_period_us").read_text()
    )
    assert str(group) in " ".join(held.entered(["true"]))
    held.remove()
    assert not group.exists()


def test_figures_that_are_not_had_are_not_met() -> None:
    found = parts.Found()
    found.at_most("a", None, 1.0)
    found.at_most("b", 1.0, 1.0)
    found.at_least("c", 0.9, 1.0)
    found.at_most("d", float("nan"), 1.0)
    assert [check["met"] for check in found.checks] == [False, True, False, False]
    assert parts.relative([2.0, 4.0], [2.0, 5.0]) == 0.2


def test_rows_settle_after_the_last_change() -> None:
    rows = [[6, 6]] * 4 + [[7, 5]] * 2 + [[8, 4]] * 3
    assert unequal._settled(rows, 2) == 4
    assert unequal._settled([[6, 6]] * 5, 2) is None


def test_half_written_lines_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps-0"
    path.write_text("0 1.5 77 0x1p+0\n1 2.5 7")
    assert lines_of(path) == [Line(0, 1.5, 77, "0x1p+0")]
    assert lines_of(tmp_path / "steps-1") == []
