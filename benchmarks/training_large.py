"""Train a model whose parameters and states are several times the memory: GPT-2 large with 774 M parameters.

    python -m benchmarks.training_large [--budget 4GiB] [--batch 1] [--tokens 256] [--steps 2]

A checkpoint of random weights is written tensor by tensor. Then a process in a memory cgroup of the budget
and 700 MiB builds the model on the meta device and trains it from there with AdamW: it cannot have held the
model, of which eager PyTorch needs four copies. Writes
``benchmarks/results/training_large-<machine>-<date>.json`` with seconds, losses and the peak of anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.anonymous import PeakSampler, anonymous_bytes
from benchmarks.environment import describe_environment, result_path
from benchmarks.limited import run_limited
from benchmarks.training_contenders import LEARNING_RATE, loss_fn
from benchmarks.training_planning import WIDTHS, build_model
from gascompile.units import MIB, format_size, parse_size

PROCESS_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""
THREADS = 2
_INITIAL = 0.02
"""Standard deviation of GPT-2's first weights."""
_PART = 1 << 22


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process and return what that took."""
    import gascompile

    torch.set_num_threads(THREADS)
    baseline_bytes = anonymous_bytes()
    with PeakSampler() as sampler:
        begin_s = time.perf_counter()
        model = build_model(options.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        step = gascompile.compile_step(
            model,
            loss_fn,
            optimizer,
            options.budget,
            batch_of(options.batch, options.tokens, 0),
            checkpoint=options.checkpoint,
            machine=options.machine,
        )
        setup_s = time.perf_counter() - begin_s
        setup_peak_bytes = sampler.take_peak_bytes()
        times_s, losses, peaks_bytes, stalls_s = [], [], [], []
        for number in range(options.steps):
            batch = batch_of(options.batch, options.tokens, number)
            start_s = time.perf_counter()
            losses.append(float(step(batch)))
            times_s.append(time.perf_counter() - start_s)
            peaks_bytes.append(sampler.take_peak_bytes())
            assert step.last_run is not None
            stalls_s.append(step.last_run.stall_s)
        plan, run = step.plan, step.last_run
        assert plan is not None
        assert run is not None
        # Whatever can be had of the values would not fit: the process ends with the step open.
    return {
        "setup_s": setup_s,
        "times_s": times_s,
        "stalls_s": stalls_s,
        "losses": losses,
        "baseline_bytes": baseline_bytes,
        "setup_peak_bytes": setup_peak_bytes,
        "step_peak_bytes": max(peaks_bytes),
        "predicted_s": plan.certificate.predicted_s,
        "gap": plan.certificate.gap,
        "strategy": plan.strategy,
        "planned_peak_bytes": plan.peak_bytes["cpu"],
        "measured_peak_bytes": run.peak_bytes["cpu"],
        "link_bytes": dict(run.link_bytes),
        "paths": dict(run.paths),
    }


def train(options: argparse.Namespace, scratch: Path, console: Console) -> dict[str, Any] | None:
    """Write the checkpoint and train from it in a process under a limit; ``None`` where that failed."""
    model = build_model(options.layers)
    path = scratch / "model.safetensors"
    weights_bytes = write_checkpoint(model, path)
    limit_bytes = parse_size(options.budget) + PROCESS_BYTES
    command = ["env", f"TMPDIR={scratch}"]
    if options.machine is None:
        # A measurement of the machine takes more memory than the limit, and is not what is measured here.
        warm = "import gascompile.machine as m, gascompile.config as c, gascompile.runtime.engine as e; "
        warm += "m.resolve_machine(None, cache_dir=c.CompileConfig().cache_dir, read=e.read_blocks)"
        subprocess.run([sys.executable, "-c", warm], check=True)
    command += [sys.executable, "-m", "benchmarks.training_large", "--checkpoint", str(path)]
    command += ["--layers", str(options.layers), "--budget", options.budget]
    command += ["--batch", str(options.batch), "--tokens", str(options.tokens)]
    command += ["--steps", str(options.steps)]
    command += ["--machine", options.machine] if options.machine else []
    done = run_limited(command, limit_bytes, timeout_s=options.limit_s)
    if done.returncode:
        console.print(f"exit code {done.returncode}\n{done.stderr[-4000:]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "cgroup_bytes": limit_bytes if done.limited else None,
        "weights_bytes": weights_bytes,
        # Parameters, gradients and two moments.
        "eager_bytes": 4 * weights_bytes,
        **found,
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the result file, or, with a checkpoint, be the process that trains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, choices=sorted(WIDTHS), default=36)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--machine", help="name or file; this machine, if not given")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoint; temporary")
    parser.add_argument("--limit-s", type=float, default=1200)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.checkpoint is not None:
        print(json.dumps(measure(options)))
        return 0
    console = Console(stderr=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gascompile-large-", dir=options.scratch) as folder:
        found = train(options, Path(folder), console)
    if found is None:
        return 1
    result = {
        "benchmark": "training_large",
        "environment": describe_environment(),
        "load_before": load,
        "layers": options.layers,
        "budget": options.budget,
        "batch": options.batch,
        "tokens": options.tokens,
        "optimizer": f"AdamW, lr {LEARNING_RATE}",
        **found,
    }
    output = options.output or result_path("training_large")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(
        f"{options.steps} steps in {', '.join(f'{time_s:.1f}' for time_s in found['times_s'])} s, set up in "
        f"{found['setup_s']:.1f} s; anonymous memory {format_size(found['step_peak_bytes'])}, of which libraries "
        f"{format_size(found['baseline_bytes'])}, where eager needs {format_size(found['eager_bytes'])}; "
        f"losses {found['losses']}\nwritten: {output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
