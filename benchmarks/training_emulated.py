"""Training steps on the emulated accelerator: eager's losses, the time that plans predict, and how near their bound.

``python -m benchmarks.training_emulated`` trains GPT-2 small on four sequences of 256 tokens in one GiB of emulated
memory behind the links of the preset ``emulated``: 2 GB/s up, 1 GB/s down, a drive of 1 GB/s. Once the host has room
for all that leaves, once so little that files take a part. Eager trains the same batches in the same process. One
thread computes, as in ``benchmarks.emulated``. Into ``benchmarks/results/training_emulated-<machine>-<date>.json``
goes, beside the seconds, how busy other processes kept the processor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.environment import headed, write_result
from benchmarks.training_contenders import LEARNING_RATE, PLANNING_S, batch_of, build_model, loss_fn
from gascompile import compile_step
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.serial import to_json
from gascompile.core.sizes import GIB, MIB, format_size
from gascompile.core.steps import Recompute
from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

TIME_TOLERANCE, LEAST_SHARE = 0.10, 0.90
_WARM_STEPS = 2
"""The first step brings values to their places, the second takes pages that no step before has."""
_WIDTH = 120

CASES: dict[str, tuple[int, tuple[int | None, ...]]] = {
    "gpt2": (GIB, (None, 640 * MIB)),
    "toy": (2 * MIB, (None, 11 * MIB)),
}
"""Bytes of the accelerator, and of the host per row."""


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer whose kernel planned updates call, so that bits can be compared."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def eager(shape: str, count: int) -> tuple[list[float], float]:
    """Return the losses of plain steps, and the seconds of a typical one."""
    model = build_model(shape)
    optimizer = adamw(model)
    losses, times_s = [], []
    for number in range(count):
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch_of(shape, number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        times_s.append(time.perf_counter() - start_s)
    return losses, statistics.median(times_s[1:])


def planned(
    shape: str, machine: Machine, budget: Budget, cache: Path, losses: list[float]
) -> dict[str, Any]:
    """Return what one plan predicted and what its steps took."""
    model = build_model(shape)
    found, times_s = [], []
    others = OtherWork()
    with compile_step(
        model,
        loss_fn,
        adamw(model),
        budget,
        batch_of(shape, 0),
        machine=machine,
        cache_dir=cache,
        time_limit_s=PLANNING_S[shape],
    ) as step:
        for number in range(len(losses)):
            if number == _WARM_STEPS:
                others.begin()
            found.append(float(step(batch_of(shape, number))))
            assert step.last_run is not None
            times_s.append(step.last_run.seconds)
        plan, report = step.plan, step.last_run
    assert plan is not None
    assert report is not None
    predicted_s, median_s = plan.certificate.predicted_s, statistics.median(times_s[_WARM_STEPS:])
    bound_s = plan.certificate.lower_bound_s
    moved = {name: count for name, count in report.link_bytes.items() if count}
    return {
        "budget_bytes": dict(plan.budget_bytes),
        "predicted_s": predicted_s,
        "median_s": median_s,
        "times_s": times_s,
        "time_error": predicted_s / median_s - 1,
        "time_holds": abs(predicted_s / median_s - 1) <= TIME_TOLERANCE,
        "bound_s": bound_s,
        "share_of_bound": bound_s / median_s,
        "share_holds": bound_s / median_s >= LEAST_SHARE,
        "binding": plan.certificate.binding,
        "compute_s": sum(op.time_s for op in plan.ops),
        "recomputed_ops": sum(isinstance(s, Recompute) for s in plan.steps),
        "stall_s": report.stall_s,
        "others_cpu": others.num_processors(),
        "losses": found,
        "losses_hold": found == losses,
        "link_bytes": moved,
        "bytes_hold": moved == {name: count for name, count in plan.link_bytes.items() if count},
        "planned_peak_bytes": dict(plan.peak_bytes),
        "peak_bytes": dict(report.peak_bytes),
        "peak_holds": all(plan.budget_bytes[t] >= n for t, n in report.peak_bytes.items())
        and report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"],
        "paths": dict(report.paths),
        "strategy": plan.strategy,
    }


def show(rows: list[dict[str, Any]], eager_s: float, console: Console) -> None:
    """Print the result as a table."""
    table = Table(title=f"Training on the emulated accelerator; eager in RAM: {eager_s:.2f} s")
    for title in ("gpu", "cpu", "predicted", "measured", "error", "share of bound", "moved"):
        table.add_column(title, justify="right")
    for title in ("losses", "bytes", "peaks", "others"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            format_size(row["peak_bytes"]["gpu"]),
            format_size(row["peak_bytes"]["cpu"]),
            f"{row['predicted_s']:.3f} s",
            f"{row['median_s']:.3f} s",
            f"{row['time_error']:+.1%}",
            f"{row['share_of_bound']:.3f}",
            format_size(sum(row["link_bytes"].values())),
            "equal" if row["losses_hold"] else "WRONG",
            "exact" if row["bytes_hold"] else "WRONG",
            "kept" if row["peak_holds"] else "WRONG",
            f"{row['others_cpu']:.2f}",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per plan")
    parser.add_argument("--cache", type=Path, help="folder to keep the machine and plans in")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=_WIDTH)
    shape = "toy" if options.toy else "gpt2"
    gpu_bytes, hosts = CASES[shape]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as scratch:
        cache = options.cache or Path(scratch) / "cache"
        own = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
        tier = replace(own.tiers["gpu"], size_bytes=gpu_bytes)
        machine = own.with_place(tier)
        losses, eager_s = eager(shape, _WARM_STEPS + options.steps)
        rows = [
            planned(shape, machine, Budget(gpu=gpu_bytes, cpu=cpu_bytes), cache, losses)
            for cpu_bytes in hosts
        ]
        result = {
            **headed("training_emulated"),
            "model": shape,
            "steps": options.steps,
            "time_tolerance": TIME_TOLERANCE,
            "least_share": LEAST_SHARE,
            "machine": to_json(machine),
            "eager_s": eager_s,
            "plans": rows,
        }
    output = write_result(result, options.output)
    show(rows, eager_s, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
