"""Does the emulated accelerator keep the time that plans for it predict? Where its links bound a run, it must.

``python -m benchmarks.emulated`` compiles small models for budgets that leave most weights outside, behind the
links of the preset ``emulated``, or slower ones, runs them, and writes
``benchmarks/results/emulated-<machine>-<date>.json``. Bytes per link must be exact and peaks within the budget;
seconds count as predicted within 10 %. Beside each run stands how busy other processes kept the processor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import gascompile
from benchmarks.environment import headed, write_result
from benchmarks.llama_checkpoint import write_llama
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.serial import to_json
from gascompile.core.sizes import MIB, format_size
from gascompile.cost_models.measure.host import OtherWork
from gascompile.integrations.huggingface import build_skeleton
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

TIME_TOLERANCE = 0.10
_WARM_RUNS = 2
_WIDTH = 120

SHAPES = {
    "llama-100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 4000,
    },
    "llama-30m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 4000,
    },
    "llama-toy": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 500,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One plan to grade."""

    model: str
    budget_bytes: int
    """Of the accelerator."""
    homes: str
    """Where weights may stay: ``both``, or ``nvme`` alone, with no room for them in RAM."""
    tokens: int


PAIRS = tuple(
    Pair(model=model, budget_bytes=mib * MIB, homes=homes, tokens=tokens)
    for model, mib, homes, tokens in (
        ("llama-30m", 32, "both", 1),
        ("llama-30m", 32, "nvme", 1),
        ("llama-30m", 60, "both", 16),
        ("llama-100m", 60, "both", 1),
        ("llama-100m", 48, "both", 16),
        ("llama-100m", 60, "nvme", 1),
    )
)
TOY = (
    Pair(model="llama-toy", budget_bytes=MIB, homes="both", tokens=4),
    Pair(model="llama-toy", budget_bytes=MIB, homes="nvme", tokens=4),
)


def slower(machine: Machine, times: float) -> Machine:
    """Return ``machine`` with every link and pipe slowed down."""
    return replace(
        machine,
        links=tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times)
            for link in machine.links
        ),
        pipes=tuple(
            replace(pipe, bandwidth_bytes_per_s=pipe.bandwidth_bytes_per_s / times)
            for pipe in machine.pipes
        ),
    )


def grade(pair: Pair, folder: Path, machine: Machine, cache: Path, runs: int) -> dict[str, Any]:
    """Return what one plan predicted and what its runs took."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 400, (1, pair.tokens), generator=generator)
    inputs = {"input_ids": tokens, "use_cache": False}
    staging_bytes = machine.io.staging_bytes
    budget = Budget(
        gpu=pair.budget_bytes, cpu=staging_bytes + MIB if pair.homes == "nvme" else None
    )
    with gascompile.compile(
        build_skeleton(folder),
        budget,
        example_inputs=inputs,
        checkpoint=folder,
        machine=machine,
        cache_dir=cache,
        fuse="off",
    ) as compiled:
        for _ in range(_WARM_RUNS):
            outputs = compiled(**inputs)
        others = OtherWork()
        others.begin()
        times_s = []
        for _ in range(runs):
            start_s = time.perf_counter()
            compiled(**inputs)
            times_s.append(time.perf_counter() - start_s)
        plan, report = compiled.plan, compiled.last_run
    assert report is not None
    assert all(x.isfinite().all() for x in pytree.tree_leaves(outputs))
    predicted_s, median_s = plan.certificate.predicted_s, statistics.median(times_s)
    timeline = gascompile.simulate(plan)
    return {
        **asdict(pair),
        "predicted_s": predicted_s,
        "median_s": median_s,
        "times_s": times_s,
        "time_error": predicted_s / median_s - 1,
        "time_holds": abs(predicted_s / median_s - 1) <= TIME_TOLERANCE,
        "others_cpu": others.num_processors(),
        "compute_s": sum(op.time_s for op in plan.ops),
        "link_busy_s": dict(timeline.link_busy_s),
        "binding": plan.certificate.binding,
        "planned_link_bytes": _moved(plan.link_bytes),
        "link_bytes": _moved(report.link_bytes),
        "bytes_hold": _moved(plan.link_bytes) == _moved(report.link_bytes),
        "peak_bytes": dict(report.peak_bytes),
        "peak_holds": report.peak_bytes["gpu"] <= pair.budget_bytes
        and report.peak_bytes["cpu"] <= plan.budget_bytes["cpu"],
        "paths": dict(report.paths),
        "strategy": plan.strategy,
    }


def _moved(link_bytes: Any) -> dict[str, int]:
    return {name: count for name, count in link_bytes.items() if count}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="Emulated accelerator: predicted and measured")
    for title in ("model", "budget", "homes", "tokens", "predicted", "measured", "error"):
        table.add_column(title, justify="right")
    for title in ("bytes", "peak", "others"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            format_size(row["budget_bytes"]),
            row["homes"],
            str(row["tokens"]),
            f"{row['predicted_s'] * 1e3:.1f} ms",
            f"{row['median_s'] * 1e3:.1f} ms",
            f"{row['time_error']:+.1%}",
            "exact" if row["bytes_hold"] else "WRONG",
            format_size(row["peak_bytes"]["gpu"]) + ("" if row["peak_holds"] else " WRONG"),
            f"{row['others_cpu']:.2f}",
        )
    console.print(table)
    for name, text in (
        ("time_holds", "seconds within 10 %"),
        ("bytes_hold", "bytes per link exact"),
        ("peak_holds", "peaks within the budget"),
    ):
        console.print(f"{text}: {sum(row[name] for row in rows)} of {len(rows)}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="folder to keep the checkpoints in")
    parser.add_argument("--runs", type=int, default=5, help="timed runs per plan")
    parser.add_argument("--slower", type=float, default=1.0, help="slow the links down so often")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=_WIDTH)
    # Beside one thread that computes the others have a processor for what real links do alone.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as scratch:
        cache = Path(scratch) / "cache"
        own = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
        machine = slower(own, options.slower)
        rows = []
        for pair in TOY if options.toy else PAIRS:
            folder = (options.models or Path(scratch) / "models") / pair.model
            write_llama(folder, SHAPES[pair.model])
            rows.append(grade(pair, folder, machine, cache, options.runs))
        result = {
            **headed("emulated"),
            "runs": options.runs,
            "time_tolerance": TIME_TOLERANCE,
            "slower": options.slower,
            "machine": to_json(machine),
            "pairs": rows,
        }
    output = write_result(result, options.output)
    show(rows, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
