"""Is recompute or move decided by the drive, and do predicted seconds of training steps come true?

``python -m benchmarks.training_prediction`` plans the same models for the same budgets on drives of several
speeds, and runs each plan on such a drive: the kernel holds the process to the speed (a blkio cgroup; root is
needed), and the machine file says it. It writes ``benchmarks/results/training_prediction-<machine>-<date>.json``:
per run what is computed again, what is moved, and predicted and measured seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.environment import headed, write_result
from benchmarks.throttled import can_throttle
from gascompile.api.calibrate import calibrate_machine
from gascompile.commands.output import grid
from gascompile.core.machine import Machine
from gascompile.core.serial import dumps, to_json
from gascompile.core.sizes import format_size
from gascompile.runtime.transfer.engine import read_blocks

TOLERANCE = 0.10
TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One plan to make and to run."""

    model: str
    budget: str
    disk_bytes_per_s: float | None
    """None: the drive as it is."""


COMBINATIONS = tuple(
    Combination(model=model, budget=budget, disk_bytes_per_s=speed)
    for model, budget, speeds in (
        ("gpt2", "2.5GiB", (60e6, 250e6, None)),
        ("gpt2", "2.0GiB", (None,)),
        ("gpt2", "1.5GiB", (None,)),
        ("gpt2", "1.0GiB", (None,)),
        ("llama-60m", "900MiB", (60e6, 250e6, None)),
        ("llama-60m", "1.2GiB", (None,)),
    )
    for speed in speeds
)
TOY = (
    Combination(model="toy", budget="6MiB", disk_bytes_per_s=20e6),
    Combination(model="toy", budget="6MiB", disk_bytes_per_s=None),
)


def with_disk(machine: Machine, bytes_per_s: float | None) -> Machine:
    """Return the machine with a drive that reads and writes at ``bytes_per_s``, each for itself."""
    if bytes_per_s is None:
        return machine
    source = f"set to {bytes_per_s / 1e6:.0f} MB/s by the kernel"
    links = tuple(
        replace(link, bandwidth_bytes_per_s=bytes_per_s, pipe_bytes_per_byte=None, source=source)
        for link in machine.links
    )
    pipes = tuple(
        replace(pipe, bandwidth_bytes_per_s=2 * bytes_per_s, source=source)
        for pipe in machine.pipes
    )
    return replace(machine, links=links, pipes=pipes)


def run(combination: Combination, machine: Machine, scratch: Path, steps: int) -> dict[str, Any]:
    """Return what the worker found, or ``failed`` with the reason."""
    path = scratch / "machine.json"
    slow = with_disk(machine, combination.disk_bytes_per_s)
    path.write_text(dumps(to_json(slow)), encoding="utf-8")
    command = ["env", f"XDG_CACHE_HOME={scratch / 'cache'}", sys.executable]
    command += ["-m", "benchmarks.training_prediction_worker", combination.model]
    command += ["--budget", combination.budget, "--machine", str(path)]
    command += ["--scratch", str(scratch), "--steps", str(steps)]
    if combination.disk_bytes_per_s is not None:
        command += ["--disk-bytes-per-s", str(combination.disk_bytes_per_s)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {**asdict(combination), "failed": f"not finished after {TIMEOUT_S:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {**asdict(combination), "failed": lines[-1]}
    return {**asdict(combination), **json.loads(done.stdout.strip().splitlines()[-1])}


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    speed = row["disk_bytes_per_s"]
    name = [row["model"], row["budget"], f"{speed / 1e6:.0f} MB/s" if speed else "as it is"]
    if "failed" in row:
        return [*name, row["failed"], "", "", "", "", ""]
    return [
        *name,
        f"{row['num_recomputed']} ({row['recomputed_s']:.2f} s)",
        format_size(row["moved_bytes"]),
        f"{row['predicted_s']:.2f} s",
        f"{row['median_s']:.2f} s",
        f"{row['error']:+.1%}",
        format_size(row["peak_bytes"]),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write its result file; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--scratch", type=Path, help="folder for files; temporary")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    combinations = TOY if options.toy else COMBINATIONS
    if not can_throttle(options.scratch or Path(tempfile.gettempdir())):
        console.print(
            "drives cannot be slowed here (blkio cgroups and root are needed): only as it is"
        )
        combinations = tuple(c for c in combinations if c.disk_bytes_per_s is None)
    rows = []
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gascompile-predict-", dir=options.scratch) as folder:
        scratch = Path(folder)
        machine = calibrate_machine(cache_dir=scratch / "machine", read=read_blocks)
        for combination in combinations:
            row = run(combination, machine, scratch, options.steps)
            if "failed" not in row:
                row["error"] = row["predicted_s"] / row["median_s"] - 1
            rows.append(row)
            console.print("  " + "  ".join(cells(row)))
    within = [abs(row["error"]) <= TOLERANCE for row in rows if "error" in row]
    result = {
        **headed("training_prediction"),
        "load_before": load_before,
        "machine": to_json(machine),
        "steps": options.steps,
        "within_tolerance": sum(within),
        "rows": rows,
    }
    output = write_result(result, options.output)
    columns = ("budget", "drive", "computed again", "moved", "predicted", "measured", "off", "peak")
    heads = [("model", False), *((name, True) for name in columns)]
    console.print(grid("Training steps, predicted and measured", heads, [cells(r) for r in rows]))
    console.print(f"{sum(within)} of {len(rows)} within {TOLERANCE:.0%}; written: {output}")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
