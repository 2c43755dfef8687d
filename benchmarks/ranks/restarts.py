"""A job that ``torchrun`` starts again, whose ranks are killed at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.ranks.jobs import last_lines

_LOOK_S = 0.02
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Line:
    """A step that one rank has done."""

    number: int
    at: float
    process: int
    loss: str


def lines_of(path: Path) -> list[Line]:
    """Return what a rank has written down, whole lines only."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    fields = (line.split() for line in whole)
    return [
        Line(int(number), float(at), int(process), loss) for number, at, process, loss in fields
    ]


class Restarted:
    """Ranks under ``torchrun --max-restarts``; ended with the block."""

    def __init__(self, folder: Path, module: Sequence[str], size: int, restarts: int) -> None:
        """Start the job; its ranks write a line per step to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.size = folder, size
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        command += [f"--max-restarts={restarts}", "--standalone", "-m", *module]
        # Byte code is kept, as pip keeps that of what it installs: else this package is compiled at every start.
        given = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env = {
            **given,
            "OMP_NUM_THREADS": "1",
            "CPU_GROUP": "",
            "CACHE": str(folder / "cache"),
        }
        with (folder / "job.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Self:
        """Return the job."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        for child in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()

    def children(self) -> list[int]:
        """Return the processes of its ranks."""
        command = ["pgrep", "-P", str(self.process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(number) for number in done.stdout.split()]

    def lines(self) -> list[Line]:
        """Return the steps that rank 0 has done so far, those done again included."""
        return lines_of(self.folder / "steps-0")

    def waits_for(self, after: float, *, not_of: Sequence[int] = ()) -> Line:
        """Return the first step later than ``after`` of another process than those named.

        Raises:
            RuntimeError: the job ends before, or nothing comes for two minutes.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            for line in self.lines():
                if line.at > after and line.process not in not_of:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(_LOOK_S)
        raise RuntimeError(f"no step comes any more: {last_lines(self.folder / 'job.log')}")

    def kill(self, chance: random.Random, count: int) -> float:
        """Kill random ranks and return when."""
        found = self.children()
        for child in chance.sample(found, min(count, len(found))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return time.time()


def killed_often(job: Restarted, kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """Kill ``kills`` times, one rank or two at once, in steps and while they start; return what it took each time."""
    found: list[dict[str, Any]] = []
    job.waits_for(0.0)
    while len(found) < kills:
        time.sleep(chance.uniform(0.2, 2.0))
        many = 2 if chance.random() < 0.25 else 1
        before = {line.process for line in job.lines()}
        at = job.kill(chance, many)
        if chance.random() < 0.2 and len(found) + 1 < kills:
            # Once more while they start again.
            time.sleep(chance.uniform(0.5, 4.0))
            found.append({"at_once": many, "seconds": None})
            many, at = 1, job.kill(chance, 1)
        line = job.waits_for(at, not_of=[*before])
        found.append({"at_once": many, "seconds": line.at - at})
    return found


def spec_of(folder: Path, task: dict[str, Any]) -> list[str]:
    """Return the arguments of a worker that does one task and writes to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({"tasks": [task]}))
    return ["benchmarks.ranks.worker", str(folder / "spec.json"), str(folder)]
