"""The benchmark of small calls at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import small_calls


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_results_are_eagers(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert small_calls.main(["--toy", "-o", str(output)]) == 0
    found = json.loads(output.read_text())
    assert len(found["rows"]) == 4
    assert all(row["equal"] for row in found["rows"].values())
    assert found["capture"]["equal"]
