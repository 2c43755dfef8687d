"""Does a plan's prediction come true? Predicted and measured seconds, peaks and bytes per link, side by side.

``python -m benchmarks.prediction`` runs every combination of model, budget and tokens in a process of its own
and writes ``benchmarks/results/prediction-<machine>-<date>.json``. The machine is calibrated before each model,
as a shared host changes its speed within minutes, and each combination is planned as on a machine that has never
seen its model. None of the models takes part in the calibration. Beside each combination stands how fast the
machine was at that moment, compared with the calibration, and how busy others kept it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import headed, write_result
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from gascompile.api.calibrate import calibrate_machine
from gascompile.core.machine import Machine
from gascompile.core.serial import dumps, to_json
from gascompile.core.sizes import format_size
from gascompile.cost_models.measure.compute import ColdWeights, matrix_rates
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

TIME_TOLERANCE = 0.10
PEAK_TOLERANCE = 0.02
SHAPE_300M = {
    **SHAPE_1B,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
}
_PROBE_ROWS = 128
_FILE_WIDTH = 130
"""Of the table where it is not printed on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One plan to grade."""

    model: str
    budget: str
    tokens: int


COMBINATIONS = tuple(
    Combination(model=model, budget=budget, tokens=tokens)
    for model, budget, tokens in (
        ("gpt2", "2GiB", 1),
        ("gpt2", "2GiB", 128),
        ("gpt2", "300MiB", 16),
        ("llama-300m", "3GiB", 1),
        ("llama-300m", "3GiB", 128),
        ("llama-300m", "400MiB", 1),
        ("llama-300m", "400MiB", 16),
        ("llama-300m", "400MiB", 128),
        ("llama-300m", "800MiB", 16),
        ("llama-1b", "1.5GiB", 1),
        ("llama-1b", "1.5GiB", 128),
        ("llama-1b", "6GiB", 1),
    )
)
TOY = (
    Combination(model="llama-toy", budget="8MiB", tokens=1),
    Combination(model="llama-toy", budget="1GiB", tokens=4),
)


def write_model(name: str, folder: Path) -> Path:
    """Write the checkpoint called ``name`` into ``folder``, with random weights."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        return folder
    shape = {"llama-300m": SHAPE_300M, "llama-1b": SHAPE_1B}.get(name)
    if shape is None:
        shape = {**SHAPE_1B, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2000}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 8}
    return write_llama(folder, shape)


class Probe:
    """How fast the processor is right now, by the same two measurements each time."""

    def __init__(self) -> None:
        self._weights = ColdWeights()

    def now(self) -> dict[str, float]:
        """Return the rate of a one-row product's weights and of a product of 128 rows."""
        rates = matrix_rates(self._weights, rows=(_PROBE_ROWS,), num_calls=15, limit_s=3.0)
        return {
            "weights_bytes_per_s": self._weights.bytes_per_s(),
            "float32_flops_per_s": rates["float32"][0].flops_per_s,
        }


def grade(
    combination: Combination, model: Path, machine: Path, scratch: Path, runs: int
) -> dict[str, Any]:
    """Return what one combination predicted and measured."""
    command = [sys.executable, "-m", "benchmarks.prediction_worker", str(model)]
    command += ["--budget", combination.budget, "--tokens", str(combination.tokens)]
    command += ["--machine", str(machine), "--scratch", str(scratch), "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SystemExit(f"{combination} failed with code {done.returncode}:\n{tail}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    row["time_error"] = row["predicted_s"] / row["median_s"] - 1
    row["peak_error"] = row["planned_peak_bytes"] / row["measured_peak_bytes"] - 1
    row["time_holds"] = abs(row["time_error"]) <= TIME_TOLERANCE
    row["peak_holds"] = abs(row["peak_error"]) <= PEAK_TOLERANCE
    row["bytes_hold"] = row["planned_link_bytes"] == row["link_bytes"]
    return {**asdict(combination), **row}


def report(result: dict[str, Any], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="Predicted and measured, steady state, median of the runs")
    for title in ("model", "budget", "tokens", "predicted", "measured", "error", "peak", "error"):
        table.add_column(title, justify="right")
    for title in ("bytes", "others", "speed"):
        table.add_column(title, justify="right")
    for row in result["combinations"]:
        table.add_row(
            row["model"],
            row["budget"],
            str(row["tokens"]),
            f"{row['predicted_s'] * 1e3:.1f} ms",
            f"{row['median_s'] * 1e3:.1f} ms",
            f"{row['time_error']:+.1%}",
            format_size(row["measured_peak_bytes"]),
            f"{row['peak_error']:+.1%}",
            "exact" if row["bytes_hold"] else "WRONG",
            f"{row['others_cpu']:.2f}",
            " ".join(f"{share:.2f}" for share in row["speed_now"].values()),
        )
    console.print(table)
    console.print(
        "others: processors that other processes kept busy during the runs; speed: of the processor before "
        "the runs, relative to the calibration (one row, 128 rows)"
    )
    total = len(result["combinations"])
    for name, text in (
        ("time_holds", "seconds within 10 %"),
        ("peak_holds", "peaks within 2 %"),
        ("bytes_hold", "bytes per link exact"),
    ):
        console.print(f"{text}: {sum(row[name] for row in result['combinations'])} of {total}")


def measured_machine(options: argparse.Namespace, scratch: Path) -> Machine:
    """Return the machine that was named, or this one, calibrated now."""
    if options.machine is not None:
        return resolve_machine(options.machine, cache_dir=scratch, read=read_blocks)
    return calibrate_machine(cache_dir=scratch / "machine", read=read_blocks)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="folder to keep the checkpoints in (6 GB)")
    parser.add_argument("--machine", help="a machine file; calibrated now without it")
    parser.add_argument("--runs", type=int, default=5, help="timed runs per combination")
    parser.add_argument("--only", help="combinations whose text holds this, such as 'gpt2 2GiB'")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _FILE_WIDTH)
    combinations = TOY if options.toy else COMBINATIONS
    if options.only:
        combinations = tuple(c for c in combinations if options.only in _text(c))
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as folder:
        scratch = Path(folder)
        models = options.models or scratch / "models"
        paths = {c.model: models / c.model for c in combinations}
        for name, path in paths.items():
            if not (path / "config.json").exists():
                console.print(f"writing {name}")
                write_model(name, path)
        probe = Probe()
        file = scratch / "machine.json"
        machines: dict[str, Machine] = {}
        rows = []
        for number, combination in enumerate(combinations):
            model = combination.model
            if model not in machines:
                console.print(f"calibrating for {model}")
                machines[model] = measured_machine(options, scratch)
                file.write_text(dumps(machines[model]))
                reference = probe.now()
            now = probe.now()
            fresh = scratch / str(number)
            row = grade(combination, paths[model], file, fresh, options.runs)
            shutil.rmtree(fresh, ignore_errors=True)
            row["speed_now"] = {name: now[name] / rate for name, rate in reference.items()}
            row["load"] = os.getloadavg()[0]
            rows.append(row)
            console.print(
                f"  {_text(combination):<26} predicted {row['predicted_s'] * 1e3:8.1f} ms, measured "
                f"{row['median_s'] * 1e3:8.1f} ms, {row['time_error']:+.1%}"
            )
        result = {
            **headed("prediction"),
            "runs": options.runs,
            "time_tolerance": TIME_TOLERANCE,
            "peak_tolerance": PEAK_TOLERANCE,
            "machines": {model: to_json(machine) for model, machine in machines.items()},
            "combinations": rows,
        }
    output = write_result(result, options.output)
    report(result, console)
    console.print(f"written: {output}")
    return result


def _text(combination: Combination) -> str:
    return f"{combination.model} {combination.budget} {combination.tokens}"


if __name__ == "__main__":
    main()
