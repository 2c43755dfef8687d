"""The benchmark of what compiled models cost in the place of models, at toy size."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drop_in


def test_parts_measure_and_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(part: str, options: argparse.Namespace, folder: Path, way: str = "") -> dict[str, Any]:
        options = argparse.Namespace(**{**vars(options), "folder": folder, "way": way or part})
        return drop_in._PARTS[part](drop_in.Case(options))

    monkeypatch.setattr(drop_in, "_run", here)
    output = tmp_path / "result.json"
    drop_in.main(["lines", "rows", "--toy", "--folder", str(tmp_path), "-o", str(output)])
    parts = json.loads(output.read_text())["parts"]
    assert parts.keys() == {"lines", "rows"}
    assert all(part["equal"] and part["figure"] > 0 for part in parts.values())
    assert "times the tokens/s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        drop_in.main(["nothing"])
