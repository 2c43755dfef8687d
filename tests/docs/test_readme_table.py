"""The script that writes the newest result of the benchmark into the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.llama_checkpoint import SHAPE_1B
from benchmarks.readme_section import replaced
from benchmarks.readme_table import BEGIN, END, main, newest_result, render

_GIB = 1 << 30


def _result(date: str = "2026-01-02") -> dict[str, Any]:
    def row(tokens: int) -> dict[str, Any]:
        ours = {
            "median_s": 1.25,
            "budget_bytes": 3 * _GIB // 2,
            "measured_peak_bytes": _GIB,
            "cgroup_bytes": 3 * _GIB,
        }
        return {
            "tokens": tokens,
            "gascompile": ours,
            "accelerate": {"median_s": 5.0, "kills": 1},
            "limit_s": 1.2,
            "speedup": 4.0,
            "share_of_limit": 0.96,
        }

    return {
        "benchmark": "inference_offload",
        "date": date,
        "environment": {
            "processor": "Some CPU",
            "cores": 2,
            "memory_bytes": 24 * _GIB,
            "versions": {"torch": "2.13.0", "accelerate": "1.15.0"},
        },
        "model": SHAPE_1B,
        "runs": 5,
        "steady_state": [row(1), row(128)],
        "first_output": {"cold_s": 9.04, "warm_s": 2.5, "accelerate_s": 12.0},
        "curve": [
            {
                "budget": "600MiB",
                "median_s": 1.5,
                "predicted_s": 1.4,
                "measured_peak_bytes": 599 << 20,
                "link_bytes": {"nvme->cpu": _GIB, "cpu->nvme": 0},
            }
        ],
    }


def _write(folder: Path, name: str, data: object) -> Path:
    path = folder / f"inference_offload-{name}.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return path


def test_a_result_becomes_tables() -> None:
    text = render(_result(), "results/a.json")
    assert "| 128 | 1.250 s | 5.000 s | 4.00 x | 1.200 s | 96.0% | 1.00 GiB |" in text
    assert "| 600MiB | 1.500 s | 1.400 s | 599.00 MiB | 1.00 GiB |" in text
    for part in ("4.4 GB in float32", "budget of 1.50 GiB", "Some CPU with 2 cores", "5 runs"):
        assert part in text
    for part in ("9.0 s with an empty cache", "2.5 s with the plan", "12.0 s with accelerate"):
        assert part in text
    assert "control group of 3.00 GiB; 1 of them were killed" in text
    assert "2026-01-02: [results/a.json](results/a.json)" in text
    assert text.isascii()


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"steady_state": None, "curve": "none", "model": 3, "first_output": []},
        {"steady_state": [{"tokens": 1}, None], "curve": [{}], "environment": {"cores": True}},
    ],
)
def test_what_a_result_lacks_is_shown_as_missing(result: dict[str, Any]) -> None:
    text = render(result, "x.json")
    assert "unknown processor" in text
    assert "unknown size" in text
    assert "- with accelerate" in text


def test_the_newest_date_is_taken(tmp_path: Path, readme: Path) -> None:
    assert newest_result(tmp_path) is None
    _write(tmp_path, "zzz-2025-12-31", _result("2025-12-31"))
    newest = _write(tmp_path, "aaa-2026-01-02", _result())
    (tmp_path / "other-2027-01-01.json").write_text("{}")
    assert newest_result(tmp_path) == newest
    arguments = ["--results", str(tmp_path), "--readme", str(readme)]
    assert main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert newest.name in text
    assert "old" not in text


def test_without_a_result_nothing_is_written(
    tmp_path: Path, readme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = readme.read_text()
    assert main(["--results", str(tmp_path), "--readme", str(readme)]) == 1
    assert "make bench" in capsys.readouterr().err
    assert readme.read_text() == before


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "inference_offload-x.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit, match=path.name):
        newest_result(tmp_path)


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(SystemExit, match="once each"):
        replaced(text, "body", BEGIN, END)


def test_the_readme_shows_the_newest_result(root: Path) -> None:
    results = root / "benchmarks" / "results"
    if newest_result(results) is None:
        pytest.skip("no result is committed")
    assert main(["--check"]) == 0, "run: python -m benchmarks.readme_table"
