"""The benchmark of training on a GPU runs at toy size on the emulated accelerator; what it says of rows, by hand."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from benchmarks import gpu_training, gpu_training_worker
from gascompile.core.serial import to_json
from tests.in_process import run_here
from tests.training.devices import EMULATED

LOSSES = [8.0, 4.0]


def row(**more: Any) -> dict[str, Any]:
    return {"losses": LOSSES, "median_s": 0.5, "allocated_peak_bytes": 70, **more}


def planned_row(**more: Any) -> dict[str, Any]:
    figures = {"budget_bytes": 80, "predicted_s": 0.4, "measured_peak_bytes": {"gpu": 60}}
    said = {"link_bytes": {"cpu->gpu": 5}, "host_ops": ["a"], "graphs": None, "compile_s": 1.0}
    return row(**figures, **said, **more)


def bench(tmp_path: Path, *, limit_s: float = 1000.0) -> gpu_training.Bench:
    options = argparse.Namespace(
        limit_s=limit_s, contenders=list(gpu_training.NEEDED_S), runs=1, machine=None, toy=True
    )
    return gpu_training.Bench(tmp_path, options)


@pytest.mark.slow
def test_a_toy_run_trains_as_eager_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch, "benchmarks.gpu_training_worker", gpu_training_worker.main)
    monkeypatch.setattr(gpu_training, "SHARES", (0.5,))
    output = tmp_path / "result.json"
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(to_json(EMULATED)))
    command = ["--machine", str(machine), "--toy", "--runs", "1", "--scratch", str(tmp_path)]
    contenders = ["--contenders", "eager", "gascompile"]
    threads = torch.get_num_threads()
    try:
        assert gpu_training.main([*command, *contenders, "-o", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(output.read_text())
    assert list(result["contenders"]) == contenders[1:]
    assert result["profile"]["name"] == EMULATED.name
    ours = result["contenders"]["gascompile"]["rows"]
    assert [found["budget_bytes"] for found in ours] == gpu_training.budgets_of("toy", [])
    for found in ours:
        assert found["keeps_budget"]
        assert found["largest_difference"] < 1e-5
        assert sum(found["link_bytes"].values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_training.main([]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_rows_are_graded_by_hand() -> None:
    found = gpu_training.graded(planned_row(), [8.0, 5.0])
    assert found["largest_difference"] == pytest.approx(0.2)
    assert found["predicted_of_measured"] == pytest.approx(0.8)
    assert found["peak_bytes"] == 70
    assert found["keeps_budget"]
    above = planned_row() | {"measured_peak_bytes": {"gpu": 81}}
    assert not gpu_training.graded(above, [])["keeps_budget"]
    assert "largest_difference" not in gpu_training.graded(above, [])
    assert gpu_training.graded({"failed": "x"}, LOSSES) == {"failed": "x"}


def test_budgets_are_shares_of_eagers_peak() -> None:
    assert gpu_training.budgets_of("toy", [row()]) == [35, 17]
    num_weights = gpu_training_worker.build_model("toy").num_parameters()  # type: ignore[operator]
    assert gpu_training.budgets_of("toy", [{"failed": "x"}]) == [8 * num_weights, 4 * num_weights]


def test_failures_and_broken_budgets_are_told() -> None:
    above = {**planned_row(), "peak_bytes": 81, "keeps_budget": False}
    contenders = {
        "eager": {"rows": [], "failed": "left out"},
        "gascompile": {"rows": [above, {"budget_bytes": 40, "failed": "no room"}]},
        "fsdp2": {"rows": []},
        "checkpoint": {"rows": [row()]},
    }
    assert gpu_training.failures({"contenders": contenders}) == [
        "eager: left out",
        "gascompile: took 81 B of 80 B",
        "gascompile: no room",
        "fsdp2: no row",
    ]


def test_rows_before_the_time_is_up_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def late(command: list[str], *, timeout: float, **_: Any) -> None:
        asked.append(timeout)
        printed = b'{"median_s": 1.0}\n{"median_'
        raise subprocess.TimeoutExpired(command, timeout, output=printed, stderr=b"slow")

    monkeypatch.setattr(subprocess, "run", late)
    answer = bench(tmp_path).run("fsdp2", [])
    assert (answer.rows, answer.log) == ([{"median_s": 1.0}], "slow")
    assert "not finished" in answer.failed
    # What comes later has its time.
    assert asked[0] == pytest.approx(1000.0 - gpu_training.NEEDED_S["checkpoint"], abs=1.0)
    assert "left out" in bench(tmp_path, limit_s=20.0).run("gascompile", [1]).failed


def test_a_budget_that_fails_lets_the_next_have_its_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(_: argparse.Namespace, budget_bytes: int) -> dict[str, Any]:
        if budget_bytes == 1:
            raise RuntimeError("no room")
        return row()

    monkeypatch.setitem(gpu_training_worker.CONTENDERS, "gascompile", given)
    command = ["worker", "gascompile", "--scratch", str(tmp_path), "--budgets", "1", "2"]
    monkeypatch.setattr("sys.argv", command)
    gpu_training_worker.main()
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["budget_bytes"], first["failed"]) == (1, "RuntimeError: no room")
    assert "given" in first["trace"]
    assert second == {"budget_bytes": 2, **row()}


def test_the_table_has_what_was_measured() -> None:
    rows = [gpu_training.graded(planned_row(), LOSSES), {"failed": "x"}]
    contenders = {"eager": {"rows": [row()]}, "gascompile": {"rows": rows}}
    console = Console(file=io.StringIO(), width=130)
    gpu_training.show({"contenders": contenders}, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "-20%" in shown and "0.4000 s" in shown
    assert shown.count("0.5000 s") == 2
