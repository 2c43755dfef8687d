"""Starts the ranks of a job, each within its limits, and collects what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks.limits import Confined, Limits, network

WORKER = "benchmarks.ranks.worker"
LIMIT_S = 600.0
ONE_CORE = Limits(cores=1.0)
_LAST_LINES = 8


@dataclass(slots=True, kw_only=True)
class Ended:
    """How the ranks of a job ended."""

    codes: list[int | None]
    """Exit codes; ``None`` for a rank that had not ended in time."""
    peaks_bytes: list[int | None]
    found: list[Any]
    """What each rank wrote; ``None`` where it wrote nothing."""
    said: list[str]
    """The end of what each rank printed."""

    @property
    def is_well(self) -> bool:
        """Whether all ranks ended well."""
        return not any(code != 0 for code in self.codes)

    def required(self) -> list[Any]:
        """Return what the ranks wrote.

        Raises:
            RuntimeError: one has failed; says what it printed last.
        """
        for rank, code in enumerate(self.codes):
            if code != 0:
                raise RuntimeError(f"rank {rank} ended with {code}: {self.said[rank]}")
        return self.found

    def trained(self) -> list[Any]:
        """Return what the ranks wrote, of tasks that none refused.

        Raises:
            RuntimeError: one has failed, or refused a task.
        """
        for rank, tasks in enumerate(self.required()):
            for task in tasks:
                if "error" in task:
                    raise RuntimeError(f"rank {rank}: {task['error']}")
        return self.found


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass(slots=True, kw_only=True)
class Job:
    """Ranks that run."""

    ranks: list[subprocess.Popen[bytes]]
    confined: list[Confined]
    folder: Path

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait until all ranks have ended, or the time is over."""
        until_s = time.monotonic() + limit_s
        codes: list[int | None] = []
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(until_s - time.monotonic(), 0.01))
            codes.append(rank.poll())
        numbers = range(len(self.ranks))
        return Ended(
            codes=codes,
            peaks_bytes=[confined.peak_bytes() for confined in self.confined],
            found=[_read(self.folder / f"{rank}.json") for rank in numbers],
            said=[last_lines(self.folder / f"{rank}.log") for rank in numbers],
        )


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def last_lines(path: Path) -> str:
    """Return the end of what a rank printed."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return " | ".join(lines[-_LAST_LINES:])


@contextlib.contextmanager
def started(
    folder: Path,
    spec: Mapping[str, Any],
    limits: Sequence[Limits],
    *,
    worker: str = WORKER,
    given: Mapping[str, str] | None = None,
    shared: Limits | None = None,
) -> Iterator[Job]:
    """Start one rank per entry of ``limits`` on ``spec``; all are ended with the block.

    Args:
        folder: of the whole benchmark, with its caches.
        spec: what the worker does.
        limits: of each rank.
        worker: its module.
        given: variables of the environment beside those that ``torchrun`` would set.
        shared: limits of all ranks together, of other kinds than each one's.
    """
    own = folder / f"job-{uuid.uuid4().hex[:8]}"
    own.mkdir(parents=True)
    (own / "spec.json").write_text(json.dumps(spec))
    job = Job(ranks=[], confined=[], folder=own)
    port = str(free_port())
    around = Confined(shared or Limits())
    try:
        for rank, limit in enumerate(limits):
            job.confined.append(Confined(limit))
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(limits)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": str(spec.get("threads", 1)),
                "CPU_GROUP": job.confined[-1].cpu_group,
                "CACHE": str(folder / f"cache-{limit.cores}-{spec.get('threads', 1)}"),
                **(given or {}),
            }
            command = [sys.executable, "-m", worker, str(own / "spec.json"), str(own)]
            with (own / f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    around.entered(job.confined[-1].entered(command)),
                    env=env,
                    stdout=log,
                    stderr=log,
                )
            job.ranks.append(process)
        yield job
    finally:
        for process in job.ranks:
            process.kill()
        for confined in (*job.confined, around):
            confined.remove()


def run(
    folder: Path,
    spec: Mapping[str, Any],
    limits: Sequence[Limits],
    *,
    worker: str = WORKER,
    limit_s: float = LIMIT_S,
    bytes_per_s: float | None = None,
) -> Ended:
    """Run a job to its end; ``bytes_per_s`` is of the network between two ranks."""
    with network(bytes_per_s) as (hosts, given):
        within = list(limits)
        if bytes_per_s is not None:
            within = [
                Limits(
                    cores=limit.cores,
                    memory_bytes=limit.memory_bytes,
                    drives=limit.drives,
                    namespace=host,
                )
                for limit, host in zip(limits, hosts, strict=True)
            ]
        with started(folder, spec, within, worker=worker, given=given) as job:
            return job.wait(limit_s)
