"""A 1.1B-parameter Llama (fp32, 4.4 GB) under a memory budget: GASCompile, accelerate and the limits.

``python -m benchmarks.inference_offload`` runs every contender in a process and memory cgroup of its
own, one after the other, and writes ``benchmarks/results/inference_offload-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import headed, write_result
from benchmarks.limited import can_limit, run_limited
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from gascompile.core.serial import dumps, to_json
from gascompile.core.sizes import GIB, MIB, format_size, parse_size
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

CGROUP_BYTES = 3 * GIB
PROCESS_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""
BUDGET = "1.5GiB"
_KILLED = -9
_RETRIES = 3
CURVE = ("600MiB", "900MiB", "1.5GiB", "2GiB", "3GiB", "4.5GiB")


class Bench:
    """Runs contenders on one model folder."""

    def __init__(self, model: Path, scratch: Path, runs: int, console: Console) -> None:
        self.machine: Path | None = None
        self._model = model
        self._scratch = scratch
        self._runs = runs
        self._console = console

    def run(
        self,
        contender: str,
        tokens: int,
        *,
        budget: str = BUDGET,
        limit_bytes: int = CGROUP_BYTES,
        scratch: str = "shared",
        measured: bool = True,
    ) -> dict[str, Any]:
        """Run one contender in its own process and cgroup and return what it printed."""
        folder = self._scratch / scratch
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.inference_worker", contender]
        command += ["--model", str(self._model), "--scratch", str(folder)]
        command += ["--tokens", str(tokens), "--budget", budget, "--runs", str(self._runs)]
        if measured and self.machine is not None:
            command += ["--machine", str(self.machine)]
        done = run_limited(command, limit_bytes)
        retries = 0
        while done.returncode == _KILLED and retries < _RETRIES:
            # The peer's page cache and its weights together come close to the limit.
            retries += 1
            self._console.print(f"  {contender} was killed at its memory limit; again")
            done = run_limited(command, limit_bytes)
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise SystemExit(f"{contender} failed with code {done.returncode}:\n{tail}")
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        result["kills"] = retries
        result["cgroup_bytes"] = limit_bytes if done.limited else None
        seconds = result.get("median_s", 0.0)
        self._console.print(f"  {contender:<11} {tokens:>4} tokens  {budget:>7}  {seconds:7.3f} s")
        return result


def steady_state(bench: Bench, tokens: int) -> dict[str, Any]:
    """Return speed against accelerate and against the limit for one token count."""
    ours = bench.run("gascompile", tokens)
    peer = bench.run("accelerate", tokens)
    read = bench.run("read", tokens)
    resident = bench.run("resident", tokens, limit_bytes=8 * GIB)
    limit_s = max(read["median_s"], resident["median_s"])
    return {
        "tokens": tokens,
        "gascompile": ours,
        "accelerate": peer,
        "read": read,
        "resident": resident,
        "limit_s": limit_s,
        "speedup": peer["median_s"] / ours["median_s"],
        "share_of_limit": limit_s / ours["median_s"],
        "same_output": abs(ours["checksum"] / peer["checksum"] - 1) < 1e-5,
    }


def first_output(bench: Bench, scratch: Path) -> dict[str, Any]:
    """Return the time from nothing to the first output: empty cache, cached plan, accelerate."""
    shutil.rmtree(scratch / "cold", ignore_errors=True)
    cold = bench.run("gascompile", 1, scratch="cold", measured=False)
    warm = bench.run("gascompile", 1, scratch="cold", measured=False)
    peer = bench.run("accelerate", 1, scratch="cold")
    return {
        "cold_s": cold["first_output_s"],
        "warm_s": warm["first_output_s"],
        "cold_compile_s": cold["compile_s"],
        "warm_compile_s": warm["compile_s"],
        "accelerate_s": peer["first_output_s"],
        "cold_speedup": peer["first_output_s"] / cold["first_output_s"],
        "warm_speedup": peer["first_output_s"] / warm["first_output_s"],
    }


def budget_curve(bench: Bench) -> list[dict[str, Any]]:
    """Return speed and peaks over growing budgets, each in a cgroup of the budget and the process's share."""
    points = []
    for budget in CURVE:
        limit_bytes = parse_size(budget) + PROCESS_BYTES
        result = bench.run("gascompile", 1, budget=budget, limit_bytes=limit_bytes)
        result["budget"] = budget
        points.append(result)
    return points


def report(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables."""
    table = Table(title="Steady state, 1.5 GiB budget, median of the runs")
    for title in ("tokens", "GASCompile", "accelerate", "limit", "speed-up", "of limit", "peak"):
        table.add_column(title, justify="right")
    for row in result["steady_state"]:
        table.add_row(
            str(row["tokens"]),
            f"{row['gascompile']['median_s']:.3f} s",
            f"{row['accelerate']['median_s']:.3f} s",
            f"{row['limit_s']:.3f} s",
            f"{row['speedup']:.2f} x",
            f"{row['share_of_limit']:.1%}",
            format_size(row["gascompile"]["measured_peak_bytes"]),
        )
    console.print(table)
    first = result["first_output"]
    console.print(
        f"first output: empty cache {first['cold_s']:.1f} s, cached plan {first['warm_s']:.1f} s "
        f"(compile {first['warm_compile_s']:.2f} s), accelerate {first['accelerate_s']:.1f} s"
    )
    table = Table(title="More budget, 1 token")
    for title in ("budget", "seconds", "predicted", "peak", "streamed"):
        table.add_column(title, justify="right")
    for row in result["curve"]:
        table.add_row(
            row["budget"],
            f"{row['median_s']:.3f} s",
            f"{row['predicted_s']:.3f} s",
            format_size(row["measured_peak_bytes"]),
            format_size(sum(row["link_bytes"].values())),
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="checkpoint folder; written when missing (4.4 GB)"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs per contender")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    if not can_limit():
        console.print("no memory cgroup can be made here (root is needed): running without limits")
    shape = SHAPE_1B
    if options.toy:
        shape = {**SHAPE_1B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as folder:
        scratch = Path(folder)
        model = write_llama(options.model or scratch / "llama", shape)
        bench = Bench(model, scratch, options.runs, console)
        machine = resolve_machine(None, cache_dir=scratch / "machine", read=read_blocks)
        bench.machine = scratch / "machine.json"
        bench.machine.write_text(dumps(machine))
        result = {
            **headed("inference_offload"),
            "model": shape,
            "runs": options.runs,
            "machine": to_json(machine),
            "steady_state": [steady_state(bench, tokens) for tokens in (1, 128)],
            "first_output": first_output(bench, scratch),
            "curve": budget_curve(bench),
        }
    output = write_result(result, options.output)
    report(result, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
