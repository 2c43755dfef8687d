"""Ranks that train a model together, against eager on whole batches; ranks that fail, by what the others are told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.distributed import rank_worker
from tests.distributed.jobs import SCENARIOS, WIDE_BYTES, FilledOnce, Scenario, eager, rows_of
from tests.training.trials import TRANSFER_BYTES

_LIMIT_S = 480.0
DIFFERENT = (
    *("other model", "other options", "other lr", "eval", "edits", "reads"),
    *("edits of its own", "moments of its own"),
)
"""What one rank does by itself, or each with other values."""
RESUMED = ("resumes:kept", "resumes:dropout")
_ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def run_job(
    folder: Path, size: int, *asked: str, worker: str = "tests.distributed.rank_worker"
) -> list[int]:
    """Run the same scenarios on ``size`` ranks; return the exit codes."""
    ranks: list[subprocess.Popen[bytes]] = []
    of_job = _environment()
    for rank in range(size):
        env = {
            **of_job,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "PYTHONHASHSEED": str(rank),
        }
        command = [sys.executable, "-m", worker, str(folder), *asked]
        log = (folder / f"log-{rank}").open("ab")
        ranks.append(subprocess.Popen(command, cwd=_ROOT, env=env, stdout=log, stderr=log))
        log.close()
    try:
        return [process.wait(_LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def run_forked_job(folder: Path, size: int, *asked: str, worker: str) -> list[int]:
    """Do the same with ranks that import what they need once, and order sets alike."""
    command = [sys.executable, "-m", "tests.distributed.forked_ranks"]
    with subprocess.Popen(
        [*command, worker, str(size), str(folder), *asked],
        cwd=_ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as launcher:
        try:
            codes: list[int] = json.loads(launcher.communicate(timeout=_LIMIT_S)[0])
            return codes
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise


def _environment() -> dict[str, str]:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **job}


def left_by(folder: Path, size: int, asked: str, *ranks: int) -> list[dict[str, Any]]:
    """Return what ``ranks`` of a job left, or all."""
    found = []
    for rank in ranks or range(size):
        path = folder / f"{asked.replace(':', '-')}.{rank}-of-{size}.pt"
        assert path.is_file(), (folder / f"log-{rank}").read_text()[-3000:]
        found.append(torch.load(path, weights_only=True))
    return found


def close(found: Any, wanted: Any) -> None:
    """Compare two trees of tensors and numbers within the rounding of sums in another order."""
    ours, theirs = (dict(pytree.tree_flatten_with_path(tree)[0]) for tree in (found, wanted))
    assert [*map(str, ours)] == [*map(str, theirs)]
    for own, whole in zip(ours.values(), theirs.values(), strict=True):
        if isinstance(whole, torch.Tensor):
            torch.testing.assert_close(own, whole, rtol=2e-5, atol=2e-6)
        else:
            assert own == whole


@pytest.fixture(scope="module")
def two(filled_once: FilledOnce) -> Path:
    """What two ranks left that train, meet what breaks nothing, and in the end what does."""
    asked = [
        *(f"trains:{name}" for name in SCENARIOS),
        "nan",
        "forgets",
        "lengths",
        "watched",
        "refuses:kept",
        *RESUMED,
        *DIFFERENT,
    ]

    def fill(folder: Path) -> None:
        codes = run_job(folder, 2, *asked, "local norm", "raises:kept")
        assert codes == [0, 0], [(folder / f"log-{r}").read_text()[-3000:] for r in range(2)]

    return filled_once("ranks", fill)


@pytest.mark.parametrize("name", SCENARIOS)
def test_equal_to_one_process(two: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    found, wanted = left_by(two, 2, f"trains:{name}"), eager(scenario)
    for rank in found:
        assert rank["reads"], "these ranks are of one host"
        close(rank["losses"], wanted.losses)
        close(rank["state"]["model"], wanted.model)
        close(_plain(rank["state"]["optimizer"]), _plain(wanted.optimizer))
        close(rank["closed"]["model"], wanted.model)
        close(_plain(rank["closed"]["optimizer"]), _plain(wanted.optimizer))
    assert found[0]["rows"] == found[1]["rows"]
    assert sum(found[0]["rows"]) == sum(rows_of(scenario, 2)) or "rows" in scenario.options
    for own, other in zip(found[0]["sampled"], found[1]["sampled"], strict=True):
        assert (len(own), len(other)) == tuple(found[0]["rows"])
        assert not set(own) & set(other)
    first, second = (rank["state"] for rank in found)
    for own, other in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        assert not isinstance(own, torch.Tensor) or torch.equal(own, other)
    _require_divided(scenario, found)


def test_parameters_are_divided_as_asked(two: Path) -> None:
    for name, wanted in {
        "adamw": ({}, [0, 0]),
        "kept": ({"0.weight": "kept"}, [1, 1]),
        # With an update, without one, and the evaluation.
        "again": ({"first.weight": "again", "inner.weight": "again"}, [4, 4, 2]),
    }.items():
        for rank in left_by(two, 2, f"trains:{name}"):
            assert (rank["stages"], rank["num_gathered"]) == wanted


def test_a_budget_without_room_for_whole_parameters_divides_them(two: Path) -> None:
    for rank in left_by(two, 2, "trains:chosen"):
        assert rank["stages"] == left_by(two, 2, "trains:chosen", 0)[0]["stages"]
        assert len(rank["stages"]) > 1
        assert "with whole parameters, which a rank has no budget for" in rank["division"]
        assert rank["peak_bytes"] + TRANSFER_BYTES <= WIDE_BYTES


def test_what_one_rank_asks_of_a_divided_parameter_is_refused(two: Path) -> None:
    for rank in left_by(two, 2, "trains:kept"):
        *reads, call = rank["said"]
        assert len(reads) == 3
        for said in reads:
            assert said.startswith("OpenStepError: '0.weight' is divided among the ranks")
        assert call.startswith("UnsupportedOpError: parameters are divided among the ranks")
    assert not left_by(two, 2, "trains:adamw", 0)[0]["said"]


def _require_divided(scenario: Scenario, found: list[dict[str, Any]]) -> None:
    """Each rank keeps about half of the moments."""
    sizes = [p.numel() for group in [scenario.model().parameters()] for p in group]
    keys = 1 if isinstance(scenario.optimizer([torch.zeros(1)]), torch.optim.SGD) else 2
    totals = 1 if "accumulate" in scenario.options else 0
    whole = (keys + totals) * sum(sizes)
    for rank in found:
        assert rank["num_moments"] < 0.6 * whole


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in g.items() if k in ("lr", "params")} for g in state["param_groups"]]
    return {"state": dict(state["state"]), "groups": groups}


def test_a_nan_of_one_rank_ends_the_step_on_all(two: Path) -> None:
    for rank in left_by(two, 2, "nan"):
        assert "NaN" in rank["said"]
        close(rank["after"], rank["before"])
        assert torch.isfinite(rank["loss"])


def test_plans_from_the_cache_and_new_ones_go_together(two: Path) -> None:
    first, second = (rank["loss"] for rank in left_by(two, 2, "forgets"))
    assert first == second


def test_a_batch_that_cannot_be_planned_for_costs_nothing(two: Path) -> None:
    for number, rank in enumerate(left_by(two, 2, "refuses:kept")):
        alone, together, empty, uneven, asked = rank["said"]
        if number == 0:
            assert alone.startswith(
                "RankMismatchError: rank 1 cannot do what all are about to: Capture"
            )
        else:
            assert alone.startswith("CaptureError")
        assert together.startswith("CaptureError")
        who = "RankMismatchError: rank 1 cannot do what all are about to: " if number == 0 else ""
        assert empty.startswith(f"{who}UnsupportedOpError: the batch of rank 1 has no rows")
        assert uneven.startswith(f"{who}UnsupportedOpError: tensors of the batch have [1, ")
        assert asked.startswith(f"{who}ValueError: updates=False needs a step that adds up")
        for name, value in rank["before"].items():
            assert torch.equal(rank["after"][name], value), name
            assert torch.equal(rank["closed"][name], rank["last"][name]), name
        assert any(not torch.equal(rank["last"][n], v) for n, v in rank["before"].items())


def test_rows_of_other_lengths_draw_each_by_itself(two: Path) -> None:
    first, second = left_by(two, 2, "lengths")
    assert first["losses"] == second["losses"]
    for name, value in first["model"].items():
        assert torch.equal(second["model"][name], value)
    # Rank 0 goes on with its random numbers, and what the other would have drawn by itself is not touched.
    assert (first["moved"], second["moved"]) == (True, False)


def test_the_first_rank_shows_what_each_took(two: Path) -> None:
    first, second = left_by(two, 2, "watched")
    assert (second["kept"], second["shown"]) == ({}, "")
    kept = {name: values[0] for name, values in first["kept"].items()}
    assert "train/ranks/0/rows 1" not in kept  # no step has run before
    for number in (2, 3):
        assert [kept[f"train/ranks/{rank}/rows {number}"] for rank in (0, 1)] == [3.0, 6.0]
        for rank in (0, 1):
            assert kept[f"train/ranks/{rank}/time_s {number}"] > 0
            assert kept[f"train/ranks/{rank}/peak_bytes {number}"] > 0
        # Whoever comes last to all exchanges waits for nobody.
        assert max(kept[f"train/ranks/{rank}/waited_s {number}"] for rank in (0, 1)) > 0
    assert "rank 1: 6 rows" in first["shown"].splitlines()[-1]


def test_timelines_of_ranks_are_by_one_clock(two: Path) -> None:
    first, second = left_by(two, 2, "watched")
    assert not second["path"]
    trace = json.loads(Path(first["path"]).read_text())
    events = trace["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {1: "rank 0", 2: "rank 1"}
    error_us = 1e6 * max(trace["otherData"]["clock_error_s"].values())
    assert error_us > 0
    ranks = [
        [e for e in events if e.get("cat") == "op" and e["pid"] == pid and "gather" in e["name"]]
        for pid in named
    ]
    assert len(ranks[0]) == len(ranks[1]) > 0
    for own, other in zip(*ranks, strict=True):
        # No rank has all parts before each has begun to give its own.
        for early, late in ((own, other), (other, own)):
            assert early["ts"] + early["dur"] + error_us >= late["ts"]
    assert min(e["ts"] for e in events if "ts" in e) >= 0.0


@pytest.mark.parametrize("asked", RESUMED)
def test_a_checkpoint_is_one_of_any_number_of_ranks(two: Path, asked: str) -> None:
    name = asked.partition(":")[2] or "adamw"
    scenario = SCENARIOS[name]
    wanted = eager(scenario)
    for rank in (*left_by(two, 2, asked), rank_worker.resumes(scenario, two / name)):
        assert rank["extra"] == {"number": 7}
        close(rank["losses"], wanted.next_losses)


@pytest.mark.parametrize("asked", DIFFERENT)
def test_ranks_that_differ_are_refused_on_all(two: Path, asked: str) -> None:
    for rank in left_by(two, 2, asked):
        assert rank["rank"] == 1
        assert "rank 1 and rank 0 differ" in rank["said"]


def test_what_one_rank_computes_by_itself_is_refused(two: Path) -> None:
    for rank in left_by(two, 2, "local norm"):
        assert [said.partition(":")[0] for said in rank["said"]] == ["UnsupportedOpError"] * 2
        assert "normalises by the rows of one rank" in rank["said"][0]
        assert "'mean'" in rank["said"][1]


def test_who_fails_takes_the_others_along(two: Path) -> None:
    left, failed = left_by(two, 2, "raises:kept")
    assert failed == {"raised": "a hook of the user's"}
    assert left["rank"] == 1
    assert "ValueError: a hook of the user's" in left["said"]
    # Of what was divided one rank alone has a part: nothing stands for the whole.
    assert left["lost"] == ["0.weight"]


def test_who_is_killed_in_the_middle_of_a_step_is_named(tmp_path: Path) -> None:
    codes = run_forked_job(tmp_path, 2, "killed:beside", worker="tests.distributed.rank_worker")
    assert codes == [0, -signal.SIGALRM]
    (left,) = left_by(tmp_path, 2, "killed:beside", 0)
    assert left["rank"] == 1
    assert "rank 1 is gone" in left["said"]
