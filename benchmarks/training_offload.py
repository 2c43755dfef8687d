"""Training GPT-2 small in less memory: GASCompile, recomputation, spilling, mapped optimizer states and peers.

``python -m benchmarks.training_offload`` runs every contender in a process of its own, one after the other,
on the same batches, and compares seconds per step, peaks of anonymous memory and losses. GASCompile runs in a
memory cgroup of its budget and what the interpreter and the libraries take. It writes
``benchmarks/results/training_offload-<machine>-<date>.json``.

DeepSpeed and ColossalAI are run where they are installed, and told to be missing elsewhere. Both may be in an
environment of their own that has torch and transformers as well: ``--peer-python PATH`` names its interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.environment import headed, write_result
from benchmarks.limited import can_limit, run_limited
from benchmarks.training_contenders import CONTENDERS, LEARNING_RATE, OURS, SHAPES
from benchmarks.training_peers import PACKAGES, missing, versions
from gascompile.commands.output import grid
from gascompile.core.sizes import MIB, format_size, parse_size

LIMIT_S = 1200.0
PROCESS_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""
THREADS = 2
TOLERANCE = 1e-4
"""How far a loss may lie from eager's."""
_SHORTEST_S = 10.0
_UNLIMITED_BYTES = 1 << 40
_KILLED = -9
_WIDTH = 100
BUDGETS = {"gpt2": ("2.5GiB", "1.5GiB", "1.0GiB"), "toy": ("6MiB", "5MiB")}
EXTENSIONS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
"""Where what peers compile at their first use stays."""


def jobs_of(
    shape: str, only: list[str] | None = None, budgets: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the contenders in the order in which they run: those that must not be missing come first."""
    jobs: list[dict[str, Any]] = []
    for name in (*CONTENDERS, *PACKAGES):
        jobs += [
            {"contender": name, "budget": budget}
            for budget in (budgets or BUDGETS[shape] if name == OURS else (None,))
            if only is None or name in only
        ]
    return jobs


class Bench:
    """Runs contenders, each in its own process, while there is time."""

    def __init__(self, scratch: Path, options: argparse.Namespace, console: Console) -> None:
        self._scratch = scratch
        self._options = options
        self._console = console
        self._peer_versions = versions(options.peer_python, sorted(set(PACKAGES.values())))
        self._begin_s = time.monotonic()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return what the contender printed, or ``failed`` or ``skipped`` with the reason."""
        package = PACKAGES.get(job["contender"], "")
        reason = missing(job["contender"], self._peer_versions) if package else ""
        if reason:
            return self._left(job, "skipped", reason)
        left_s = self._options.limit_s - (time.monotonic() - self._begin_s)
        if left_s < _SHORTEST_S:
            return self._failed(job, f"left out: {self._options.limit_s:.0f} s were over")
        limit_bytes = _UNLIMITED_BYTES
        if job["budget"] is not None:
            limit_bytes = parse_size(job["budget"]) + PROCESS_BYTES
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            try:
                done = run_limited(self._command(job, folder), limit_bytes, timeout_s=left_s)
            except subprocess.TimeoutExpired:
                return self._failed(job, f"not finished after {left_s:.0f} s, all that remained")
        if done.returncode == _KILLED and done.limited:
            return self._failed(job, f"killed at its memory limit of {format_size(limit_bytes)}")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return self._failed(job, lines[-1])
        result: dict[str, Any] = {**job, **json.loads(done.stdout.strip().splitlines()[-1])}
        limited = done.limited and limit_bytes != _UNLIMITED_BYTES
        result["cgroup_bytes"] = limit_bytes if limited else None
        if package:
            result["version"] = self._peer_versions[package]
        self._console.print(
            f"  {job['contender']:<18}{job['budget'] or '':>7}  {result['median_s']:8.3f} s per step  "
            f"peak {format_size(result['step_peak_bytes'])}"
        )
        return result

    def _command(self, job: dict[str, Any], folder: str) -> list[str]:
        # The caches of plans and kernels live as long as this benchmark: nothing comes from an earlier one.
        command = ["env", f"XDG_CACHE_HOME={self._scratch / 'cache'}", f"TMPDIR={folder}"]
        command += [f"TORCHINDUCTOR_CACHE_DIR={self._scratch / 'inductor'}"]
        command += [f"TORCH_EXTENSIONS_DIR={EXTENSIONS}"]
        python = sys.executable
        if job["contender"] in PACKAGES:
            python = self._options.peer_python
            # Peers compile at their first use, with the tools of their environment.
            command += [f"PATH={Path(python).parent}:{os.environ['PATH']}"]
        command += [python, "-m", "benchmarks.training_worker", job["contender"]]
        command += ["--shape", self._options.shape, "--scratch", folder]
        command += ["--threads", str(THREADS)]
        command += ["--steps", str(self._options.steps), "--warmup", str(self._options.warmup)]
        if job["budget"] is not None:
            command += ["--budget", job["budget"]]
        return command

    def _failed(self, job: dict[str, Any], reason: str) -> dict[str, Any]:
        return self._left(job, "failed", reason)

    def _left(self, job: dict[str, Any], how: str, reason: str) -> dict[str, Any]:
        self._console.print(f"  {job['contender']:<18}{job['budget'] or '':>7}  {how}: {reason}")
        return {**job, how: reason}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with what they are beside eager's: time, memory and the largest difference of losses.

    Memory is what was added to the process since its libraries were loaded.
    """
    reference = next((row for row in rows if row["contender"] == "eager"), None)
    if reference is None or "median_s" not in reference:
        return rows
    base_bytes = reference["step_peak_bytes"] - reference["baseline_bytes"]
    return [
        row
        if "median_s" not in row
        else {
            **row,
            "time_ratio": row["median_s"] / reference["median_s"],
            "memory_ratio": (row["step_peak_bytes"] - row["baseline_bytes"]) / base_bytes,
            "loss_difference": max(
                abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True)
            ),
        }
        for row in rows
    ]


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return what went wrong: contenders that failed, losses apart from eager's, budgets not kept."""
    found = []
    for row in rows:
        name = " ".join(filter(None, (row["contender"], row["budget"])))
        if "failed" in row:
            found.append(f"{name}: {row['failed']}")
            continue
        difference = row.get("loss_difference", 0.0)
        if not difference <= TOLERANCE:
            found.append(f"{name}: a loss is {difference:.2g} from eager's, above {TOLERANCE}")
        if row.get("measured_peak_bytes", 0) > row.get("budget_bytes", 0):
            found.append(
                f"{name}: took {row['measured_peak_bytes']} of {row['budget_bytes']} bytes"
            )
    return found


def report(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows as a table; memory is anonymous, above what the libraries take."""
    columns = ("budget", "step", "x eager", "memory", "x eager", "set-up", "loss off by")
    cells = []
    for row in rows:
        name = [row["contender"], row["budget"] or ""]
        if "median_s" not in row:
            cells.append([*name, "skipped" if "skipped" in row else "failed", *[""] * 5])
            continue
        compared_to = [f"{row[key]:.2f}" for key in ("time_ratio", "memory_ratio") if key in row]
        time_ratio, memory_ratio = compared_to or ("", "")
        cells.append(
            [
                *name,
                f"{row['median_s']:.2f} s",
                time_ratio,
                format_size(row["step_peak_bytes"] - row["baseline_bytes"]),
                memory_ratio,
                f"{row['setup_s'] + sum(row['warmup_s']):.1f} s",
                f"{row['loss_difference']:.0e}" if "loss_difference" in row else "",
            ]
        )
    title = "One training step, median; anonymous memory above the libraries'"
    console.print(grid(title, [("contender", False), *((name, True) for name in columns)], cells))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write its result file; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument(
        "--only", nargs="+", choices=sorted({*CONTENDERS, *PACKAGES}), help="some contenders"
    )
    parser.add_argument("--budgets", nargs="+", help="for GASCompile; 2.5GiB, 1.5GiB and 1.0GiB")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of the peers")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per contender")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--scratch", type=Path, help="folder for spilled files; temporary")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup take 1 or more")
    options.shape = "toy" if options.toy else "gpt2"
    console = Console(stderr=True, width=_WIDTH)
    if not can_limit():
        console.print("no memory cgroup can be made here (root is needed): running without limits")
    jobs = jobs_of(options.shape, options.only, options.budgets)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gascompile-train-", dir=options.scratch) as folder:
        bench = Bench(Path(folder), options, console)
        rows = compared([bench.run(job) for job in jobs])
    result = {
        **headed("training_offload"),
        "load_before": load_before,
        "model": SHAPES[options.shape],
        "optimizer": f"AdamW, lr {LEARNING_RATE}",
        "dtype": "float32",
        "threads": THREADS,
        "warmup": options.warmup,
        "steps": options.steps,
        "rows": rows,
    }
    output = write_result(result, options.output)
    report(rows, console)
    console.print(f"written: {output}")
    problems = failures(rows)
    for problem in problems:
        console.print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
