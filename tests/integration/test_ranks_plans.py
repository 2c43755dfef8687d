"""The tables of plans over ranks, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.ranks_plans import main


def test_toy_tables(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    main(path, toy=True)
    found = json.loads(path.read_text())
    for row in found["home"]["rows"]:
        assert abs(row["theirs_error"]) < 0.15
        assert row["bound_ms"] <= row["ours_ms"] * (1 + 1e-9)
        assert row["ours_within_measured"]
    assert found["large"]["ranks"] == 16
    assert found["large"]["bound_s"] <= found["large"]["predicted_s"]
    assert len(found["lohan"]["rows"]) == 2
