"""Models beyond GPU memory on this machine's GPU: GASCompile, accelerate, torch.compile and the link's limit.

``python -m benchmarks.gpu`` measures each contender in a process of its own, one after the other, on random
Llamas made here: no network, at most ten minutes. After each section it writes
``benchmarks/results/gpu-<gpu>-<date>.json``, of which ``python -m benchmarks.gpu_table`` makes the README's
table. ``--machine emulated --toy`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.environment import describe_environment, installed_version
from benchmarks.gpu_models import SHAPES, embedding_bytes, write_checkpoint

LIMIT_S = 600.0
_LONGEST_S = 240.0
"""One contender's time; building and planning the largest model is the most of it."""
_EACH_S = 50.0
"""What a contender is left at least by those before it in its section."""
_NEEDED = ("pulp", "highspy", "safetensors", "transformers")
_REPORTED = ("triton", "kvikio-cu13")
SECTIONS = ("memory", "disk", "budgets", "resident", "large")


def sections(*, toy: bool) -> dict[str, list[dict[str, Any]]]:
    """Return which contenders each section measures, and how; the most telling sections come first."""
    model, small, large = ("toy",) * 3 if toy else ("8B", "3B", "32B")
    budget, small_budget, large_budget = (
        ("1MiB", "1MiB", "1250KiB") if toy else ("6GiB", "2560MiB", "24GiB")
    )
    curve = ["1MiB", "2MiB"] if toy else ["2GiB", "3GiB", "4GiB", "6GiB", "8GiB"]
    both = {"batches": [1, 16]}
    return {
        "memory": [
            {"contender": "gascompile", "shape": model, "budgets": [budget], **both},
            {"contender": "accelerate", "shape": model, **both},
        ],
        "disk": [
            {
                "contender": "gascompile",
                "shape": small,
                "budgets": [small_budget],
                "disk": True,
                **both,
            },
            {"contender": "accelerate", "shape": small, "disk": True, **both},
        ],
        "budgets": [{"contender": "gascompile", "shape": small, "budgets": curve, "batches": [16]}],
        "resident": [
            {"contender": "gascompile", "shape": small, "budgets": [], **both},
            {"contender": "torch_compile", "shape": small, **both},
        ],
        "large": [
            {"contender": "gascompile", "shape": large, "budgets": [large_budget], **both},
            {"contender": "accelerate", "shape": large, **both},
        ],
    }


class Bench:
    """Runs contenders, each in its own process, while there is time."""

    def __init__(self, scratch: Path, options: argparse.Namespace, console: Console) -> None:
        self._scratch = scratch
        self._options = options
        self._console = console
        self._begin_s = time.monotonic()

    def run(self, job: dict[str, Any], *, later: int = 0) -> dict[str, Any]:
        """Return what the contender printed, or ``failed`` with the reason; ``later`` ones need time, too."""
        name = job["contender"]
        if name == "accelerate" and importlib.util.find_spec("accelerate") is None:
            return self._failed(job, "accelerate is not installed here")
        left_s = self._options.limit_s - (time.monotonic() - self._begin_s) - later * _EACH_S
        if left_s < _LONGEST_S / 8:
            return self._failed(
                job, f"left out: {left_s:.0f} s of {self._options.limit_s:.0f} s remain"
            )
        checkpoint = None
        if job.get("disk"):
            checkpoint = write_checkpoint(SHAPES[job["shape"]], self._scratch / job["shape"])
        try:
            done = subprocess.run(
                self._command(job, checkpoint),
                capture_output=True,
                text=True,
                timeout=min(_LONGEST_S, left_s),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"not finished after {error.timeout:.0f} s"
            return {**_last_told(error.stdout), **self._failed(job, reason)}
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {**_last_told(done.stdout), **self._failed(job, lines[-1])}
        result = _last_told(done.stdout)
        for row in result.get("rows", ()):
            self._console.print(
                f"  {name:<14}{job['shape']:>4}  {row.get('budget') or '':>7}  batch {row['batch']:>2}  "
                f"{row['median_s']:8.4f} s  {row['tokens_per_s']:8.1f} tokens/s"
            )
        return {**job, **result}

    def _command(self, job: dict[str, Any], checkpoint: Path | None) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu_worker", job["contender"]]
        command += ["--scratch", str(self._scratch), "--runs", str(self._options.runs)]
        command += ["--shape", job.get("shape", "toy")]
        if job.get("budgets"):
            command += ["--budgets", *job["budgets"]]
        if job.get("batches"):
            command += ["--batches", *(str(batch) for batch in job["batches"])]
        if self._options.machine is not None:
            command += ["--machine", self._options.machine]
        if checkpoint is not None:
            command += ["--checkpoint", str(checkpoint)]
        return command

    def _failed(self, job: dict[str, Any], reason: str) -> dict[str, Any]:
        self._console.print(f"  {job['contender']:<14}{job.get('shape', ''):>4}  failed: {reason}")
        return {**job, "failed": reason}


def _last_told(printed: str | bytes | None) -> dict[str, Any]:
    """Return the last complete object that a contender printed; nothing where there is none."""
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            told = json.loads(line)
            return told if isinstance(told, dict) else {}
    return {}


def with_limits(found: dict[str, Any], link_bytes_per_s: float | None) -> dict[str, Any]:
    """Return a contender's result whose rows say how near they came to the link, and kept their budget.

    The link's limit is the time of the bytes that cannot stay: the weights beyond the budget, less the table of
    embeddings, of which a few rows are asked for. It holds for weights in CPU memory; with weights on a drive the
    plan's own limit is the nearer one.
    """
    for row in found.get("rows", ()):
        if "budget_bytes" not in row:
            continue
        peak_bytes = row["allocated_peak_bytes"]
        row["keeps_budget"] = (
            row["measured_peak_bytes"] if peak_bytes is None else peak_bytes
        ) <= row["budget_bytes"]
        streamed_bytes = found["weight_bytes"] - embedding_bytes(SHAPES[found["shape"]])
        beyond_bytes = max(streamed_bytes - row["budget_bytes"], 0)
        if link_bytes_per_s and not found.get("disk"):
            row["link_limit_s"] = beyond_bytes / link_bytes_per_s
        if not any(row.get("link_bytes", {"": beyond_bytes}).values()):
            # Nothing moves: the plan's limit is the time of its ops one by one, and graphs give them at once.
            continue
        nearest_s = max(row.get("link_limit_s", 0.0), row["limit_s"])
        row["share_of_limit"] = nearest_s / row["median_s"]
    return found


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per batch that both have, how often the first contender of a section is faster than the second."""
    if len(results) < 2 or any("rows" not in found for found in results):
        return []
    ours, theirs = ({row["batch"]: row for row in found["rows"]} for found in results[:2])
    return [
        {
            "batch": batch,
            "speedup": theirs[batch]["median_s"] / ours[batch]["median_s"],
            "largest_difference": max(
                abs(a - b)
                for a, b in zip(ours[batch]["logits"], theirs[batch]["logits"], strict=True)
            ),
        }
        for batch in sorted(ours.keys() & theirs.keys())
    ]


def missing(*, machine: str | None) -> str | None:
    """Return why nothing can be measured here; ``None`` where it can."""
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return (
            f"planning a Llama needs {', '.join(absent)}: install them, or put them on PYTHONPATH"
        )
    if machine is None and not torch.cuda.is_available():
        return "no GPU here; --machine emulated --toy tries the script without one"
    return None


def result_path() -> Path:
    """Return ``benchmarks/results/gpu-<gpu>-<date>.json``."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "emulated"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = f"gpu-{device}-{date}.json".lower().replace(" ", "-")
    return Path(__file__).parent / "results" / name


def measure(bench: Bench, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure into ``result``, which is written after each section."""
    link = bench.run({"contender": "link"})
    result["link"] = link
    jobs = sections(toy=options.toy)
    for name in options.sections:
        results = [
            with_limits(bench.run(job, later=len(jobs[name]) - i - 1), link.get("bytes_per_s"))
            for i, job in enumerate(jobs[name])
        ]
        if results[0].get("rows") or name not in result["sections"]:
            result["sections"][name] = {"contenders": results, "compared": compared(results)}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the result begins with; sections of an earlier one on such a machine stay until measured anew."""
    environment = describe_environment()
    environment["versions"] |= {name: installed_version(name) for name in _REPORTED}
    environment["cuda"] = torch.version.cuda
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier: dict[str, Any] = json.loads(options.output.read_text(encoding="utf-8"))
        if earlier["environment"] == environment and earlier["runs"] == options.runs:
            return earlier
    return {
        "benchmark": "gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment,
        "machine": options.machine or "this machine",
        "runs": options.runs,
        "shapes": {name: shape for name, shape in SHAPES.items() if (name == "toy") == options.toy},
        "link": {},
        "sections": {},
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Return which contenders failed, and which rows took more memory than they were given."""
    found = [f"link: {result['link']['failed']}"] if "failed" in result["link"] else []
    for name, section in result["sections"].items():
        for job in section["contenders"]:
            if "failed" in job:
                found.append(f"{name}, {job['contender']}: {job['failed']}")
            found += [
                f"{name}, {job['contender']}: batch {row['batch']} took more than {row['budget']}"
                for row in job.get("rows", ())
                if row.get("keeps_budget") is False
            ]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write its result file; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", help="a machine's name; without it this machine, measured")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--runs", type=int, default=5, help="timed steps per row")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints (16 GB); temporary")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    reason = missing(machine=options.machine)
    if reason is not None:
        console.print(reason)
        return 1
    options.output = options.output or result_path()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = begun(options)
    with tempfile.TemporaryDirectory(prefix="gascompile-gpu-", dir=options.scratch) as folder:
        measure(Bench(Path(folder), options, console), options, result)
    console.print(f"written: {options.output}")
    problems = failures(result)
    for problem in problems:
        console.print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
