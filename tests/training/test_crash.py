"""Runs killed at random moments go on from a whole checkpoint and reproduce the losses of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.training.runs import CRASH_RUNS, adamw, batches, freeze, new_model, plain_step
from tests.waiting import eventually

NUM_STEPS = 1000
LANES = 2
MOST_S = 0.6
"""After being ready: a few dozen steps."""


def kind(folder: Path) -> str:
    """Return how a lane saves: every other one goes on with the next step while a checkpoint is made whole."""
    return "behind" if int(folder.name[-1]) % 2 else "blocking"


def start(folder: Path, root: Path, num_steps: int) -> subprocess.Popen[str]:
    """Return a worker that has loaded what there is and is about to train."""
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.training.crash_worker",
            str(folder),
            str(num_steps),
            kind(folder),
        ],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return what was logged, step by step; a kill may have cut the last line."""
    if not (folder / "losses").is_file():
        return []
    lines = (folder / "losses").read_text().split("\n")[:-1]
    return [(int(number), loss) for number, loss in map(json.loads, lines)]


def kill(worker: subprocess.Popen[str], folder: Path, least: int, after_s: float) -> None:
    """Kill a worker some time after so many losses have been logged."""
    eventually(lambda: len(losses(folder)) >= least)
    time.sleep(after_s)
    worker.send_signal(signal.SIGKILL)


def killed_runs(folder: Path, root: Path, count: int) -> list[tuple[int, float]]:
    """Let ``count`` runs follow each other, each killed; return the steps that they logged."""
    moments = random.Random(f"{folder.name} {count}")
    seen: list[tuple[int, float]] = []
    whole_before = 0
    # Behind steps, a checkpoint is whole before the save after it begins.
    lag = 1 + (kind(folder) == "behind")
    for number_of_run in range(count):
        known = len(losses(folder))
        worker = start(folder, root, NUM_STEPS)
        # Every other run gets past a first step, however slow the machine is.
        least = known + number_of_run % 2
        after_s = moments.uniform(0.0, MOST_S)
        killer = threading.Thread(target=kill, args=(worker, folder, least, after_s))
        with worker:
            killer.start()
            assert worker.stdout is not None
            worker.stdout.read()
        killer.join()
        assert worker.returncode == -signal.SIGKILL
        found = losses(folder)[known:]
        if found and seen:
            # The step after the last one that was logged, or one again whose save was cut off.
            assert 0 <= seen[-1][0] + 1 - found[0][0] <= lag
            assert found[0][0] == whole_before + 1
        whole = list(folder.glob("checkpoints/checkpoint-*"))
        assert len(whole) <= 1 + lag
        if whole:
            whole_before = json.loads((max(whole) / "state.json").read_text())["step"]
            assert (found[-1][0] if found else whole_before) - whole_before <= lag
        seen += found
    return seen


def test_killed_runs_resume_and_repeat_eagers_losses(tmp_path: Path, root: Path) -> None:
    folders = [tmp_path / f"lane-{number}" for number in range(LANES)]
    with ThreadPoolExecutor(LANES) as pool:
        ends = [
            pool.submit(killed_runs, folder, root, -(-CRASH_RUNS // LANES)) for folder in folders
        ]
        seen = [pair for end in ends for pair in end.result()]
    assert seen
    wanted = eager_losses(max(number for number, _ in seen))
    for number, loss in seen:
        assert loss == wanted[number - 1]
    for folder in folders:
        assert list((folder / "cache" / "training").iterdir()) == []  # what had left memory is gone


def eager_losses(num_steps: int) -> list[float]:
    """Return the losses of the run that the killed ones continue."""
    model = new_model().train()
    freeze(model)
    optimizer = adamw(model)
    torch.manual_seed(5)
    return [plain_step(model, optimizer, batch) for batch in batches(NUM_STEPS)[:num_steps]]
