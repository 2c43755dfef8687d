"""A 1.1B-parameter Llama whose weights move as fp32, bf16, int8 and int4: bytes, seconds and errors.

``python -m benchmarks.formats`` runs each form at each budget in a process of its own, round after round in
alternating order, and writes ``benchmarks/results/formats-<machine>-<date>.json``. The fp32 file holds the
same values as the bf16 file, so that both have to give the logits that eager gives in fp32. Weights are
random, which is the hard case for low-bit forms: no value is more likely than a bell curve makes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.environment import headed, write_result
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from gascompile.core.serial import dumps, to_json
from gascompile.core.sizes import format_size
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

FORMS = ("fp32", "bf16", "int8", "int4")
TOKENS = (1, 128)
BUDGETS = ("1.5GiB", "300MiB")
TOY_BUDGETS = ("9MiB",)
TOY_SHAPE = {
    **SHAPE_1B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
}


def write_models(folder: Path, shape: dict[str, int]) -> dict[str, Path]:
    """Write the checkpoint in bf16, and one in fp32 of the same values; return their folders by dtype."""
    narrow = write_llama(folder / "bf16", shape, dtype="bfloat16")
    wide = folder / "fp32"
    index = narrow / "model.safetensors.index.json"
    if not (wide / index.name).exists():
        wide.mkdir(parents=True, exist_ok=True)
        for shard in sorted(narrow.glob("*.safetensors")):
            values = {name: tensor.float() for name, tensor in load_file(shard).items()}
            save_file(values, wide / shard.name, metadata={"format": "pt"})
        config = json.loads((narrow / "config.json").read_text())
        (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
        (wide / index.name).write_text(index.read_text())
    return {"bf16": narrow, "fp32": wide}


class Bench:
    """Runs one process at a time on one pair of checkpoints."""

    def __init__(self, models: dict[str, Path], scratch: Path, options: argparse.Namespace) -> None:
        self._models = models
        self._scratch = scratch
        self._runs = options.runs

    def run(self, form: str, budget: str | None = None) -> dict[str, Any]:
        """Return what the worker measured of one form at one budget."""
        model = self._models["fp32" if form == "fp32" else "bf16"]
        command = [sys.executable, "-m", "benchmarks.formats_worker", form]
        command += ["--model", str(model), "--scratch", str(self._scratch)]
        command += ["--tokens", *(str(tokens) for tokens in TOKENS), "--runs", str(self._runs)]
        if budget is not None:
            command += ["--budget", budget, "--machine", str(self._scratch / "machine.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise SystemExit(f"{form} at {budget} failed with code {done.returncode}:\n{tail}")
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result


def measure(
    bench: Bench, budgets: tuple[str, ...], rounds: int, console: Console
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the workers' results by form and budget; every other round goes backwards."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    order = [(form, budget) for budget in budgets for form in FORMS]
    for number in range(rounds):
        for form, budget in order if number % 2 == 0 else reversed(order):
            start_s = time.perf_counter()
            result = bench.run(form, budget)
            found.setdefault((form, budget), []).append(result)
            shown = ", ".join(f"{min(row['times_s']):.3f} s" for row in result["rows"])
            took_s = time.perf_counter() - start_s
            console.print(f"  round {number + 1}  {form}  {budget:>7}  {shown}  ({took_s:.0f} s)")
    return found


def summarise(
    found: dict[tuple[str, str], list[dict[str, Any]]], budgets: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return one row per budget, tokens and form, with its speed and bytes against fp32 and bf16."""
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        for number, tokens in enumerate(TOKENS):
            group = {}
            for form in FORMS:
                results = found[form, budget]
                times_s = [t for result in results for t in result["rows"][number]["times_s"]]
                last = results[-1]["rows"][number]
                group[form] = {
                    "budget": budget,
                    "form": form,
                    **last,
                    "times_s": times_s,
                    "median_s": statistics.median(times_s),
                    "size_bytes": results[-1]["size_bytes"],
                    "largest_weight_error": results[-1]["largest_weight_error"],
                }
            for form, row in group.items():
                for other in ("fp32", "bf16"):
                    moved_bytes = group[other]["moved_bytes"]
                    row[f"speedup_over_{other}"] = group[other]["median_s"] / row["median_s"]
                    row[f"bytes_of_{other}"] = (
                        row["moved_bytes"] / moved_bytes if moved_bytes else None
                    )
                assert row["tokens"] == tokens, f"{form} measured its rows in another order"
            rows += group.values()
    return rows


def report(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="Median of the runs; errors are norms of logits against eager in fp32")
    for title in ("budget", "tokens", "form", "seconds", "of fp32", "moved", "error", "peak"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["budget"],
            str(row["tokens"]),
            row["form"],
            f"{row['median_s']:.3f} s",
            f"{row['speedup_over_fp32']:.2f} x",
            format_size(row["moved_bytes"]),
            f"{row['relative_error']:.2%}",
            format_size(row["peak_bytes"]),
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="folder of both checkpoints (6.6 GB); kept")
    parser.add_argument("--rounds", type=int, default=2, help="processes per form and budget")
    parser.add_argument("--runs", type=int, default=3, help="timed runs per process and tokens")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    shape, budgets = (TOY_SHAPE, TOY_BUDGETS) if options.toy else (SHAPE_1B, BUDGETS)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gascompile-formats-") as folder:
        scratch = Path(folder)
        models = write_models(options.models or scratch, shape)
        machine = resolve_machine(None, cache_dir=scratch / "machine", read=read_blocks)
        (scratch / "machine.json").write_text(dumps(machine))
        bench = Bench(models, scratch, options)
        bench.run("eager")
        rows = summarise(measure(bench, budgets, options.rounds, console), budgets)
    result = {
        **headed("formats"),
        "model": shape,
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "runs": options.runs,
        "seconds": time.perf_counter() - begin_s,
        "machine": to_json(machine),
        "rows": rows,
    }
    output = write_result(result, options.output)
    report(rows, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
