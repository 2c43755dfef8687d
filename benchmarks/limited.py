"""Run a command in a memory cgroup, which is how a memory promise is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_TRIES, _PAUSE_S = 20, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that ran."""

    returncode: int
    stdout: str
    stderr: str
    limited: bool
    """False where no memory cgroup can be made; the command then ran without a limit."""


def can_limit() -> bool:
    """Return whether this process may make memory cgroups."""
    group = _make_group()
    if group is None:
        return False
    group.rmdir()
    return True


def run_limited(command: Sequence[str], limit_bytes: int, *, timeout_s: float = 600) -> Finished:
    """Run ``command`` under ``limit_bytes`` of memory, page cache included; over it the kernel kills it."""
    group = _make_group()
    if group is None:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return Finished(
            returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, limited=False
        )
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(limit_bytes))
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        done = subprocess.run(
            ["/bin/sh", "-c", enter, "sh", *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    finally:
        _remove(group)
    return Finished(
        returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, limited=True
    )


def _make_group() -> Path | None:
    for root, marker in ((_V1, "memory.limit_in_bytes"), (_V2, "memory.max")):
        group = root / f"gascompile-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / marker).exists():
            return group
        group.rmdir()
    return None


def _remove(group: Path) -> None:
    """Remove a group, and end what its command has left behind, such as compilers after a timeout."""
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            for process in (group / "cgroup.procs").read_text().split():
                os.kill(int(process), signal.SIGKILL)
            group.rmdir()
        except OSError as error:
            problem = error
            time.sleep(_PAUSE_S)
        else:
            return
    print(f"cannot remove {group}: {problem}", file=sys.stderr)
