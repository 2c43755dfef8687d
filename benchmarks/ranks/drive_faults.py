"""Drives of one rank that are full, or that answer no more, while it trains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ranks.jobs import Job, started
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Result, Setting

WAIT_S = 60.0
_PAUSE_S = 0.05
_FILLING_S = 1.0
_MODEL = {"model": "gpt2", "size": "middle", "tokens": 32, "rows": [1, 1]}
"""In this budget parameters and moments leave memory in every step."""
_BUDGET = "96MiB"


@contextlib.contextmanager
def drive(folder: Path, name: str, size_bytes: int) -> Iterator[tuple[Path, str]]:
    """Yield the folder of a file system of its own, and its device as ``major:minor``.

    Raises:
        OSError: no loop device can be had.
    """
    image, mounted = folder / f"{name}.image", folder / name
    mounted.mkdir(parents=True)
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    device = ""
    try:
        _do("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        device = _do("losetup", "--find", "--show", "--direct-io=on", str(image))
        _do("mount", device, str(mounted))
        number = os.stat(mounted).st_dev
        yield mounted, f"{os.major(number)}:{os.minor(number)}"
    finally:
        for command in (["umount", str(mounted)], ["losetup", "-d", device]):
            subprocess.run(command, check=False, capture_output=True)
        image.unlink()


def _do(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def full_drive(setting: Setting, task: dict[str, Any]) -> Result:
    """The drive of the folder in which all save has no room left from some step on."""
    folder = setting.folder / "full"
    with drive(folder, "small", 96 << 20) as (mounted, _):
        task = {**task, "steps": 10_000, "checkpoints": str(mounted / "kept"), "every": 3}
        task |= {"log": str(folder), "pause_s": 0.05}
        with started(setting.folder, {"tasks": [task]}, [Limits(cores=1.0)] * 2) as job:
            _steps(folder, 5)
            at = time.time()
            _fill(mounted)
            return _outcome("a full drive", job, at)


def dead_drive(setting: Setting, task: dict[str, Any]) -> Result:
    """The drive of one rank's values does a byte per second from some step on."""
    folder = setting.folder / "dead"
    with drive(folder, "slow", 512 << 20) as (mounted, device):
        task = {**task, **_MODEL, "steps": 10_000, "budget": _BUDGET}
        task |= {"log": str(folder), "pause_s": 0.05}
        # The last rank's cache, with what leaves its memory, is on the drive.
        limits = [Limits(cores=1.0), Limits(cores=1.0, drives={device: 1e12})]
        task["cache_of_last"] = str(mounted / "cache")
        with started(setting.folder, {"tasks": [task]}, limits) as job:
            _steps(folder, 5)
            at = time.time()
            job.confined[1].give_drive(device, 1)
            try:
                return _outcome("a dead drive", job, at)
            finally:
                job.confined[1].give_drive(device, 1e12)


def _steps(folder: Path, count: int) -> None:
    """Wait until rank 0 has done so many steps."""
    until_s = time.monotonic() + 2 * WAIT_S
    path = folder / "steps-0"
    while not path.exists() or path.read_text().count("\n") < count:
        if time.monotonic() > until_s:
            raise RuntimeError(f"no steps in {folder}")
        time.sleep(_PAUSE_S)


def _fill(folder: Path) -> None:
    """Take all room, and what a checkpoint under way gives back when it takes the place of the last."""
    until_s = time.monotonic() + _FILLING_S
    with (folder / "filler").open("wb", buffering=0) as file:
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
            time.sleep(_PAUSE_S)


def _outcome(what: str, job: Job, at: float) -> Result:
    """Return how all ranks ended, and after how long."""
    ended = job.wait(WAIT_S)
    seconds, errors = [], []
    for rank in range(len(job.ranks)):
        found = (ended.found[rank] or [{}])[0]
        errors.append(found.get("error", f"none; exit code {ended.codes[rank]}"))
        seconds.append(found.get("failed_at", float("inf")) - at)
    typed = [error.split(":")[0] for error in errors]
    return {
        "what": what,
        "ranks": len(errors),
        "median_s": max(seconds) if max(seconds) < WAIT_S else None,
        "typed": all(name.endswith("Error") for name in typed),
        "errors": typed,
        "_said": errors,
    }
