"""What it takes to capture and plan the training step of a large model, which nobody has to build.

    python -m benchmarks.training_planning [--layers 12 24 48] [--tokens 1024]

GPT-2 in its published sizes on the meta device, AdamW, one sequence: per number of layers and budget a process
of its own captures the joint graph of forward and backward pass and updates, plans it, and reports wall
seconds, processor seconds (user and system), the gap to the proven bound and the peak of the process's
memory. The machine is the one that the script runs on, measured once, or a file. It writes
``benchmarks/results/training_planning-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from benchmarks.environment import headed, write_result
from benchmarks.training_contenders import LEARNING_RATE, loss_fn
from gascompile.commands.output import grid
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.core.sizes import SPILL_BUFFER_BYTES, format_size
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.training.capture.capture_step import capture_step
from gascompile.training.planning.step_plan import step_plan
from gascompile.training.planning.step_workload import step_workload

WIDTHS = {2: (64, 2), 12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25)}
"""Width and heads of GPT-2 small, medium, large and XL by their layers, and of one for tests."""
BUDGETS = {2: ("64MiB",), 12: ("1GiB",), 24: ("2GiB",), 36: ("4GiB",), 48: ("8GiB", "6GiB", "4GiB")}
"""A fraction of what parameters, moments and activations take."""
_RESERVED_BYTES = 4 * SPILL_BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock, and of the process's threads in user and in kernel mode."""

    wall_s: float
    processor_s: float


class Clock:
    """Tells what each part of a process takes."""

    def __init__(self) -> None:
        self._before = self._now()

    def lap(self) -> Spent:
        """Return what was spent since the last call."""
        now, before = self._now(), self._before
        self._before = now
        return Spent(now[0] - before[0], now[1] - before[1])

    def _now(self) -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime + used.ru_stime


def build_model(num_layers: int) -> torch.nn.Module:
    """Return GPT-2 with so many layers on the meta device, without dropout and in training mode."""
    width, heads = WIDTHS[num_layers]
    config = transformers.GPT2Config(
        n_layer=num_layers,
        n_embd=width,
        n_head=heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def measure(num_layers: int, tokens: int, budget: str, machine: Machine) -> dict[str, Any]:
    """Capture and plan one step in this process, and return what that took."""
    model = build_model(num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch = torch.zeros(1, tokens, dtype=torch.long)
    clock = Clock()
    program = capture_step(model, loss_fn, optimizer, batch)
    capture = clock.lap()
    workload = step_workload(program, machine)
    annotate = clock.lap()
    limits = Budget.of(budget, machine)
    plan = step_plan(
        workload, machine, limits, CompileConfig(), fingerprint={}, reserved_bytes=_RESERVED_BYTES
    )
    planning = clock.lap()
    persistent = {*program.program.bindings.values()}
    found = plan.certificate
    return {
        "layers": num_layers,
        "tokens": tokens,
        "budget": budget,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ops": len(workload.ops),
        "tensors": len(workload.tensors),
        "state_bytes": sum(t.size_bytes for t in workload.tensors if t.name in persistent),
        "capture": asdict(capture),
        "annotate": asdict(annotate),
        "plan": asdict(planning),
        "gap": found.gap,
        "status": found.status.value,
        "strategy": plan.strategy,
        "predicted_s": found.predicted_s,
        "lower_bound_s": found.lower_bound_s,
        "steps": len(plan.steps),
        "link_bytes": dict(plan.link_bytes),
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def report(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows; seconds by the clock, and those of processors behind them."""

    def spent(found: dict[str, float]) -> str:
        return f"{found['wall_s']:.1f} ({found['processor_s']:.1f})"

    columns = ("budget", "state", "ops", "capture s", "annotate s", "plan s", "gap", "memory")
    cells = [
        [
            str(row["layers"]),
            row["budget"],
            format_size(row["state_bytes"]),
            str(row["ops"]),
            *(spent(row[part]) for part in ("capture", "annotate", "plan")),
            f"{row['gap']:.2%}",
            format_size(row["peak_process_bytes"]),
        ]
        for row in rows
    ]
    title = "Capturing and planning a step: seconds by the clock (of processors)"
    console.print(grid(title, [("layers", True), *((name, True) for name in columns)], cells))


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in a process of its own and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--layers", type=int, nargs="+", choices=sorted(WIDTHS), default=[12, 24, 48]
    )
    parser.add_argument("--tokens", type=int, default=1024, help="in the batch's one sequence")
    parser.add_argument("--budgets", nargs="+", help="in place of one that fits the size")
    parser.add_argument("--machine", help="name or file; this machine, if not given")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    config = CompileConfig()
    machine = resolve_machine(options.machine, cache_dir=config.cache_dir, read=read_blocks)
    if options.child:
        (layers,), (budget,) = options.layers, options.budgets
        print(json.dumps(measure(layers, options.tokens, budget, machine)))
        return 0
    console = Console(stderr=True)
    rows = []
    for layers in options.layers:
        for budget in options.budgets or BUDGETS[layers]:
            command = [sys.executable, "-m", "benchmarks.training_planning", "--child"]
            command += ["--layers", str(layers), "--tokens", str(options.tokens)]
            command += ["--budgets", budget]
            command += ["--machine", options.machine] if options.machine else []
            load = os.getloadavg()[0]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                console.print(done.stderr)
                return 1
            rows.append({**json.loads(done.stdout.splitlines()[-1]), "load_before": load})
    result = {
        **headed("training_planning"),
        "machine": machine.name,
        "rows": rows,
    }
    output = write_result(result, options.output)
    report(rows, console)
    console.print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
