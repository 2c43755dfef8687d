"""Training steps beyond GPU memory on this machine's GPU: GASCompile, FSDP2 with CPU offload, eager and checkpoints.

``python -m benchmarks.gpu_training`` measures each contender in a process of its own, one after the other, on a
random Llama made here: no network, two and a half minutes at most. Budgets are shares of what eager takes. It writes
``benchmarks/results/gpu_training-<gpu>-<date>.json`` after each contender. ``--machine emulated --toy`` tries it
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import headed, installed_version, write_result
from benchmarks.gpu import missing
from benchmarks.gpu_models import weight_bytes
from benchmarks.gpu_training_worker import BATCHES, HOST, PLANNING_S, TRAINED
from gascompile.core.sizes import format_size

LIMIT_S = 150.0
NEEDED_S: dict[str, float] = {
    "eager": 15.0,
    "gascompile": 40.0,
    "gascompile-hybrid": 35.0,
    "fsdp2": 20.0,
    "checkpoint": 12.0,
}
"""In the order in which they are measured; those before leave so many seconds to a contender."""
_BUDGETED = ("gascompile", "gascompile-hybrid")
SHARES = (0.5, 0.25)
"""Of eager's peak."""
_STATES = 8
"""What eager has of each weight, times two bytes: the weight, its gradient and two moments in float32."""
_LOG_LETTERS = 4000
_WIDTH = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one contender's process said."""

    rows: list[dict[str, Any]]
    log: str
    failed: str = ""


class Bench:
    """Runs contenders, each in its own process, while there is time."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        self._scratch = scratch
        self._options = options
        self._begin_s = time.monotonic()

    def run(self, contender: str, budgets_bytes: Sequence[int]) -> Answer:
        """Return the rows of a contender, as many as there are by its end."""
        names = list(NEEDED_S)
        later = names[names.index(contender) + 1 :]
        reserved_s = sum(NEEDED_S[name] for name in later if name in self._options.contenders)
        left_s = self._options.limit_s - (time.monotonic() - self._begin_s) - reserved_s
        if left_s < NEEDED_S[contender] / 2:
            return Answer(rows=[], log="", failed=f"left out: {left_s:.0f} s remain for it")
        try:
            done = subprocess.run(
                self._command(contender, budgets_bytes),
                capture_output=True,
                text=True,
                timeout=left_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"not finished after {error.timeout:.0f} s"
            return _answer(error.stdout, error.stderr, reason)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return _answer(done.stdout, done.stderr, lines[-1] if done.returncode else "")

    def _command(self, contender: str, budgets_bytes: Sequence[int]) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu_training_worker", contender]
        command += ["--shape", shape_of(self._options), "--scratch", str(self._scratch)]
        command += ["--runs", str(self._options.runs)]
        if budgets_bytes:
            command += ["--budgets", *(str(count) for count in budgets_bytes)]
        if self._options.machine is not None:
            command += ["--machine", self._options.machine]
        return command


def _answer(output: str | bytes | None, log: str | bytes | None, reason: str) -> Answer:
    """Return the whole lines that were printed; a process that was ended gives bytes."""
    text, told = (
        part.decode(errors="replace") if isinstance(part, bytes) else part or ""
        for part in (output, log)
    )
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return Answer(rows=rows, log=told[-_LOG_LETTERS:], failed=reason)


def shape_of(options: argparse.Namespace) -> str:
    """Return the name of the model."""
    return "toy" if options.toy else "0.5B"


def budgets_of(shape: str, eager: Sequence[dict[str, Any]]) -> list[int]:
    """Return bytes of the GPU: shares of eager's peak, or of what it has to take where that is not known."""
    peaks = [row.get("allocated_peak_bytes") for row in eager]
    whole_bytes = next((n for n in peaks if n), _STATES * weight_bytes(TRAINED[shape]))
    return [int(share * whole_bytes) for share in SHARES]


def graded(row: dict[str, Any], losses: Sequence[float]) -> dict[str, Any]:
    """Return a row that says how far its losses are from eager's, and whether time and memory are as planned."""
    if "failed" in row:
        return row
    found = dict(row)
    if losses:
        pairs = zip(row["losses"], losses, strict=True)
        found["largest_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    if "budget_bytes" in row:
        found["predicted_of_measured"] = row["predicted_s"] / row["median_s"]
        # Torch does not count what graphs hold; the run's own report does.
        peaks_bytes = (row["allocated_peak_bytes"] or 0, row["measured_peak_bytes"]["gpu"])
        found["peak_bytes"] = max(peaks_bytes)
        found["keeps_budget"] = found["peak_bytes"] <= row["budget_bytes"]
    return found


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the result file holds, which is written after each contender."""
    shape = shape_of(options)
    result = headed("gpu_training")
    result["environment"]["versions"]["triton"] = installed_version("triton")
    result["environment"]["cuda"] = torch.version.cuda
    result |= {
        "machine": options.machine or "this machine",
        "model": {"shape": TRAINED[shape], "batch": BATCHES[shape], "dtype": "float32"},
        "runs": options.runs,
        "host_budget": HOST,
        "planning_s": PLANNING_S[shape],
        "profile": None,
        "contenders": {},
    }
    rows: list[dict[str, Any]] = []
    losses: list[float] = []
    for name in (name for name in NEEDED_S if name in options.contenders):
        budgets_bytes = budgets_of(shape, rows) if name in _BUDGETED else []
        start_s = time.monotonic()
        answer = bench.run(name, budgets_bytes)
        for row in answer.rows:
            result["profile"] = row.pop("profile", None) or result["profile"]
        if name == "eager":
            rows = answer.rows
            losses = next((row["losses"] for row in rows if "losses" in row), [])
        result["contenders"][name] = {
            "seconds": time.monotonic() - start_s,
            "rows": [graded(row, losses) for row in answer.rows],
            "log": answer.log,
            **({"failed": answer.failed} if answer.failed else {}),
        }
        write_result(result, options.output)
    return result


def failures(result: dict[str, Any]) -> list[str]:
    """Return which contenders failed, and which rows took more memory than they were given."""
    found = []
    for name, contender in result["contenders"].items():
        if "failed" in contender:
            found.append(f"{name}: {contender['failed']}")
        elif not contender["rows"]:
            found.append(f"{name}: no row")
        for row in contender["rows"]:
            if "failed" in row:
                found.append(f"{name}: {row['failed']}")
            elif row.get("keeps_budget") is False:
                took, given = format_size(row["peak_bytes"]), format_size(row["budget_bytes"])
                found.append(f"{name}: took {took} of {given}")
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="Training on the GPU")
    table.add_column("contender", no_wrap=True)
    for title in ("budget", "peak", "predicted", "median", "error", "moved"):
        table.add_column(title, justify="right")
    for title in ("on the host", "in graphs", "compile", "losses off by"):
        table.add_column(title, justify="right")
    for name, contender in result["contenders"].items():
        for row in contender["rows"]:
            if "failed" not in row:
                table.add_row(name, *_cells(row))
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    peak_bytes = row.get("peak_bytes", row["allocated_peak_bytes"])
    peak = format_size(peak_bytes) if peak_bytes else "-"
    off = f"{row['largest_difference']:.1e}" if "largest_difference" in row else "-"
    median = f"{row['median_s']:.4f} s"
    if "budget_bytes" not in row:
        return ["-", peak, "-", median, "-", "-", "-", "-", "-", off]
    graphs = row["graphs"]
    return [
        format_size(row["budget_bytes"]),
        peak,
        f"{row['predicted_s']:.4f} s",
        median,
        f"{row['predicted_of_measured'] - 1:+.0%}",
        format_size(sum(row["link_bytes"].values())),
        str(len(row["host_ops"])),
        f"{graphs['num_ops']} of {graphs['num_all_ops']}" if graphs else "-",
        f"{row['compile_s']:.1f} s",
        off,
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write its result file; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", help="a machine's name; without it this machine, measured")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--runs", type=int, default=5, help="timed steps per row")
    parser.add_argument("--contenders", nargs="+", choices=list(NEEDED_S), default=list(NEEDED_S))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--scratch", type=Path, help="folder for what leaves memory (8 GB)")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=_WIDTH)
    reason = missing(machine=options.machine)
    if reason is not None:
        console.print(reason)
        return 1
    if options.output is None:
        options.output = result_path(options)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-", dir=options.scratch) as folder:
        result = measure(Bench(Path(folder), options), options)
    show(result, console)
    console.print(f"written: {options.output}")
    problems = failures(result)
    for problem in problems:
        console.print(problem)
    return int(bool(problems))


def result_path(options: argparse.Namespace) -> Path:
    """Return ``benchmarks/results/gpu_training-<gpu>-<date>.json``."""
    has_gpu = options.machine is None and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_gpu else "emulated"
    date = headed("gpu_training")["date"]
    name = f"gpu_training-{device}-{date}.json".lower().replace(" ", "-")
    return Path(__file__).parent / "results" / name


if __name__ == "__main__":
    sys.exit(main())
