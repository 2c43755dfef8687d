"""Processes that find what others have planned, and import nothing of what captures and plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_WORKER = "tests.training.fresh_worker"
_RANKS = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--max-restarts=1",
    "--no-python",
    sys.executable,
]


def _started(cache: Path, *before: str) -> list[dict[str, Any]]:
    """Return what each process of a job of its own has to say."""
    command = [sys.executable, *before, "-m", _WORKER, str(cache)]
    ran = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def test_a_new_process_captures_and_plans_nothing_that_another_has(tmp_path: Path) -> None:
    (cold,), (warm,) = _started(tmp_path), _started(tmp_path)
    assert len(cold["found"]) == 12
    assert "gascompile.training.capture.joint" in cold["made"]
    assert warm["found"] == cold["found"]
    assert not warm["made"]


def test_ranks_that_are_started_again_capture_and_plan_nothing(tmp_path: Path) -> None:
    cold, *warm = _pairs(_started(tmp_path, *_RANKS))
    assert len(warm) == 1
    for before, now in zip(cold, warm[0], strict=True):
        assert "gascompile.training.capture.joint" in before["made"]
        assert now["found"] == before["found"]
        assert not now["made"]


def _pairs(said: list[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Return what two ranks have to say each time that they run."""
    return [*zip(said[::2], said[1::2], strict=True)]
