"""The planning benchmark runs at toy size, and what it writes is consistent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.planning import STAGES, TARGETS, main, misses
from gascompile.core.sizes import GIB
from tests.in_process import run_here


def test_a_toy_run_goes_from_a_config_to_a_verified_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, "benchmarks.planning", lambda: main(sys.argv[1:]))
    output = tmp_path / "planning.json"
    result = main(["--toy", "-o", str(output)])
    assert json.loads(output.read_text()) == result
    for row in (*result["cases"], *result["layers"]):
        assert set(row["wall_s"]) == set(row["cpu_s"]) == set(STAGES)
        assert row["total_s"] >= sum(row["wall_s"].values())
        assert row["replayed_s"] == pytest.approx(row["predicted_s"])
        assert row["limit_s"] <= row["lower_bound_s"] <= row["predicted_s"]
        assert row["plan_peak_bytes"]["gpu"] <= row["gpu_bytes"]
        # The interpreter and torch alone take more than 100 MB.
        assert row["peak_bytes"] > 1e8


def test_a_missed_target_is_told() -> None:
    row = {"name": "70B", "gap": 0.02, "peak_bytes": GIB, "solve_s": 4.0, "total_s": 50.0}
    assert misses(row) == ["gap", "total_s"]
    assert misses({**row, "name": "8B"}) == ["gap"]
    assert misses({"name": "70B", "infeasible": "too small"}) == []
    assert TARGETS["405B"]["solve_s"] == 15.0
