"""Train a model whose parameters and states are several times the memory: GPT-2 large with 774 M parameters.

    python -m benchmarks.training_large [--budget 4GiB] [--batch 1] [--tokens 256] [--steps 2] [--eager]

A checkpoint of random weights is written tensor by tensor. Then a process in a memory cgroup of the budget
and 700 MiB builds the model on the meta device and trains it from there with AdamW: it cannot have held its
parameters, gradients and moments. With ``--eager``, PyTorch does the same without a limit. Writes
``benchmarks/results/training_large-<machine>-<date>.json`` with seconds by the clock and of processors, losses and
the peak of anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.anonymous import PeakSampler, anonymous_bytes
from benchmarks.environment import headed, write_result
from benchmarks.limited import run_limited
from benchmarks.training_contenders import LEARNING_RATE, loss_fn
from benchmarks.training_planning import WIDTHS, Clock, build_model
from gascompile.core.config import CompileConfig
from gascompile.core.sizes import MIB, format_size, parse_size
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

PROCESS_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""
THREADS = 2
_INITIAL = 0.02
"""Standard deviation of GPT-2's first weights."""
_PART = 1 << 22
_UNLIMITED_BYTES = 1 << 40

Step = Callable[[torch.Tensor], torch.Tensor]
Details = Callable[[], dict[str, Any]]


def write_checkpoint(model: torch.nn.Module, path: Path) -> int:
    """Write random weights for a model on the meta device as safetensors, and return their bytes.

    Weights of norms are one and biases zero. Takes memory for a part of one tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            shapes[name] = tuple(tensor.shape)
        seen.add(id(tensor))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size_bytes = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    chance = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            while left:
                part = np.zeros(min(left, _PART), dtype=np.float32)
                if name.endswith("weight"):
                    is_norm = ".ln_" in name
                    part[:] = 1 if is_norm else _INITIAL * chance.standard_normal(len(part), "f4")
                file.write(part.data)
                left -= len(part)
    return end


def batch_of(batch: int, tokens: int, step: int) -> torch.Tensor:
    """Return the token ids of a step: ``[batch, tokens]``, random."""
    random = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, 50257, (batch, tokens), generator=random)


def planned(options: argparse.Namespace) -> tuple[Step, Details]:
    """Return the step of GASCompile, and what it has to say once it has run."""
    import gascompile

    model = build_model(options.layers)
    step = gascompile.compile_step(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        options.budget,
        batch_of(options.batch, options.tokens, 0),
        checkpoint=options.checkpoint,
        machine=options.machine,
        time_limit_s=options.planning_s,
    )

    def details() -> dict[str, Any]:
        plan, run = step.plan, step.last_run
        assert plan is not None
        assert run is not None
        return {
            "ops": len(plan.ops),
            "predicted_s": plan.certificate.predicted_s,
            "gap": plan.certificate.gap,
            "strategy": plan.strategy,
            "planned_peak_bytes": plan.peak_bytes["cpu"],
            "measured_peak_bytes": run.peak_bytes["cpu"],
            "stall_s": run.stall_s,
            "link_bytes": dict(run.link_bytes),
            "paths": dict(run.paths),
        }

    return step, details


def eager(options: argparse.Namespace) -> tuple[Step, Details]:
    """Return the same step in PyTorch, with everything in memory."""
    model = build_model(options.layers)
    model.load_state_dict(load_file(options.checkpoint), strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]  # a method of transformers' models
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, dict


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process and return what that took; it ends with the values where they are."""
    torch.set_num_threads(THREADS)
    baseline_bytes = anonymous_bytes()
    with PeakSampler() as sampler:
        clock = Clock()
        step, details = (eager if options.eager else planned)(options)
        setup = clock.lap()
        setup_peak_bytes = sampler.take_peak_bytes()
        spent, losses, peaks_bytes = [], [], []
        for number in range(options.steps):
            batch = batch_of(options.batch, options.tokens, number)
            clock.lap()
            losses.append(float(step(batch)))
            spent.append(clock.lap())
            peaks_bytes.append(sampler.take_peak_bytes())
    return {
        "setup": asdict(setup),
        "steps": [asdict(lap) for lap in spent],
        "losses": losses,
        "baseline_bytes": baseline_bytes,
        "setup_peak_bytes": setup_peak_bytes,
        "step_peak_bytes": max(peaks_bytes),
        **details(),
    }


def train(options: argparse.Namespace, scratch: Path, console: Console) -> list[dict[str, Any]]:
    """Write the checkpoint and train from it in a process per contender; ends early where one fails."""
    path = scratch / "model.safetensors"
    weights_bytes = write_checkpoint(build_model(options.layers), path)
    command = ["env", f"TMPDIR={scratch}"]
    command += [sys.executable, "-m", "benchmarks.training_large", "--checkpoint", str(path)]
    command += ["--layers", str(options.layers), "--budget", options.budget]
    command += ["--batch", str(options.batch), "--tokens", str(options.tokens)]
    command += ["--steps", str(options.steps), "--planning-s", str(options.planning_s)]
    command += ["--machine", options.machine] if options.machine else []
    rows: list[dict[str, Any]] = []
    for name in ["gascompile", *(["eager"] if options.eager else [])]:
        is_limited = name != "eager"
        limit_bytes = parse_size(options.budget) + PROCESS_BYTES if is_limited else _UNLIMITED_BYTES
        load = os.getloadavg()[0]
        extra = [] if is_limited else ["--eager"]
        done = run_limited([*command, *extra], limit_bytes, timeout_s=options.limit_s)
        if done.returncode:
            console.print(f"{name}: exit code {done.returncode}\n{done.stderr[-4000:]}")
            return rows
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        row |= {"contender": name, "load_before": load, "weights_bytes": weights_bytes}
        row["cgroup_bytes"] = limit_bytes if done.limited and is_limited else None
        rows.append(row)
        steps = ", ".join(f"{s['wall_s']:.1f} ({s['processor_s']:.1f})" for s in row["steps"])
        console.print(
            f"{name}: steps of {steps} s by the clock (of processors), set up in {row['setup']['wall_s']:.1f} s, "
            f"anonymous memory {format_size(row['step_peak_bytes'])} with "
            f"{format_size(row['baseline_bytes'])} of libraries, losses {row['losses']}"
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Write the result file, or, with a checkpoint, be the process that trains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, choices=sorted(WIDTHS), default=36)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="PyTorch too, in memory as it takes")
    parser.add_argument("--machine", help="name or file; this machine, if not given")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoint; temporary")
    parser.add_argument("--planning-s", type=float, default=20.0, help="for the search for a plan")
    parser.add_argument("--limit-s", type=float, default=1200, help="seconds for each")
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.checkpoint is not None:
        print(json.dumps(measure(options)))
        return 0
    console = Console(stderr=True)
    # Measured before, as that is no part of a step and takes memory that the limit has no room for.
    resolve_machine(options.machine, cache_dir=CompileConfig().cache_dir, read=read_blocks)
    with tempfile.TemporaryDirectory(prefix="gascompile-large-", dir=options.scratch) as folder:
        rows = train(options, Path(folder), console)
    result = {
        **headed("training_large"),
        "layers": options.layers,
        "budget": options.budget,
        "batch": options.batch,
        "tokens": options.tokens,
        "optimizer": f"AdamW, lr {LEARNING_RATE}",
        "threads": THREADS,
        "rows": rows,
    }
    output = write_result(result, options.output)
    console.print(f"written: {output}")
    return int(len(rows) != 1 + options.eager)


if __name__ == "__main__":
    sys.exit(main())
