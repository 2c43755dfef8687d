"""The benchmark of first and warm starts, at toy size and in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import starts


def _here(part: str, cache: Path, *, toy: bool) -> tuple[float, float]:
    return starts._ALL[part](cache, toy=toy)


def test_starts_are_measured_and_give_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starts, "_start", _here)
    output = tmp_path / "result.json"
    rounds = ["--rounds", "1", "--folder", str(tmp_path), "-o", str(output)]
    starts.main(["llama", "--toy", *rounds])
    parts = json.loads(output.read_text())["parts"]
    assert parts.keys() == {"llama again"}
    assert all(part["equal"] and part["figure"] > 0 for part in parts.values())
    assert "llama again" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        starts.main(["nothing"])


def test_a_slow_start_or_another_result_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([(9.0, 1.0), (0.1, 1.0), (1.0, 1.0), (0.1, 2.0)])
    monkeypatch.setattr(starts, "_start", lambda *_, **__: next(results))
    (tmp_path / "known").mkdir()
    (tmp_path / "model").mkdir()
    found = starts.measure("layers", tmp_path, toy=True, rounds=2)
    assert found["layers first"]["figure"] == pytest.approx(4.55)
    assert not found["layers first"]["holds"] and found["layers again"]["holds"]
    assert not found["layers again"]["equal"]


def test_what_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="config"):
        starts._start("llama", tmp_path / "cache", toy=True)


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(part: str, *_: object, toy: bool) -> tuple[float, float]:
        if part == "gpt2":
            raise RuntimeError("no memory")
        (tmp_path / "known").mkdir(exist_ok=True)
        return 0.1, 1.0

    monkeypatch.setattr(starts, "_start", started)
    monkeypatch.setattr(shutil, "copytree", lambda *_: None)
    output = tmp_path / "result.json"
    assert starts.main(["gpt2", "layers", "--toy", "--rounds", "1", "-o", str(output)]) == 1
    parts = json.loads(output.read_text())["parts"]
    assert "no memory" in parts["gpt2"]["error"] and parts["layers first"]["holds"]
    with pytest.raises(SystemExit):
        starts.main(["--rounds", "0"])
