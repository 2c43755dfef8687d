"""Adapters over a packed base, as QLoRA has it, without bitsandbytes: what runs on a processor, side by side.

    python -m benchmarks.packed_lora [--budget 400MiB] [--tokens 256] [--steps 4] [--checkpoint FOLDER]

Steps of LoRA of rank 8 on a Llama of 1.1 billion weights, each way in a process of its own: planned within the budget,
in a memory cgroup of the budget and 700 MiB, over Q4_K blocks that are read in place from a GGUF file; and peft over
bases that hqq, optimum-quanto (4 bits) and torchao (8 bits) have packed in memory, of a dense model that stands there
first. These are installed beside the project, as is ninja, with which quanto compiles what it decodes with.
Losses stand beside those of the same step over the base that was not packed; each packs in its own way. Writes
``benchmarks/results/packed_lora-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.anonymous import PeakSampler
from benchmarks.environment import headed, write_result
from benchmarks.gguf_weights import write_file
from benchmarks.limited import run_limited
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from benchmarks.lora import PROCESS_BYTES, eager_step, planned_step
from gascompile.core.sizes import format_size, parse_size

_TOY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_WAYS = ("dense", "planned", "hqq", "quanto", "torchao")
_UNLIMITED_BYTES = 1 << 40
_LIMIT_S = 3600.0
NOT_HERE = {
    "bitsandbytes": "left out, as asked",
    "torchao, int4": "its packings for processors need the package mslk or have no gradient",
    "GPTQ and AWQ kernels of peft": "need a GPU",
    "EETQ and AQLM": "need a GPU",
}
"""Other ways of a packed base under adapters, and why none of them is measured."""


def _dense(options: argparse.Namespace) -> Any:
    """Return the model in memory, with pages of its own."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    for parameter in base.parameters():
        parameter.data = parameter.data.clone()
    return base


def _by_hqq(options: argparse.Namespace) -> Any:
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear

    base = _dense(options)
    HQQLinear.set_backend(HQQBackend.PYTORCH)
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    # Its search for better scales takes a processor over five minutes here, and steps take as long without it.
    config["weight_quant_params"]["optimize"] = False
    for name, module in [*base.model.named_modules()]:
        if isinstance(module, nn.Linear):
            parent, _, key = name.rpartition(".")
            packed = HQQLinear(module, config, compute_dtype=torch.float32, device="cpu")
            setattr(base.model.get_submodule(parent), key, packed)
    return base


def _by_quanto(options: argparse.Namespace) -> Any:
    from optimum.quanto import freeze, qint4, quantize

    base = _dense(options)
    quantize(base.model, weights=qint4)
    freeze(base.model)
    return base


def _by_torchao(options: argparse.Namespace) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = _dense(options)
    quantize_(base.model, Int8WeightOnlyConfig())
    return base


_BASES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "dense": _dense,
    "hqq": _by_hqq,
    "quanto": _by_quanto,
    "torchao": _by_torchao,
}


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of one way; returns losses, seconds and peaks of anonymous memory, before steps and in them."""
    torch.set_num_threads(2)
    ids = torch.randint(0, 256, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    begin_s = time.perf_counter()
    with PeakSampler() as peak:
        way = options.way
        is_planned = way == "planned"
        step: Any = (
            planned_step(options, ids, torch.float32, options.packed)
            if is_planned
            else eager_step(_BASES[way](options))
        )
        found: dict[str, Any] = {
            "ready_s": time.perf_counter() - begin_s,
            "ready_peak_bytes": peak.take_peak_bytes(),
        }
        losses, seconds = [], []
        for _ in range(options.steps):
            begin_s = time.perf_counter()
            losses.append(float(step(ids)))
            seconds.append(time.perf_counter() - begin_s)
        if is_planned:
            found |= {
                "link_bytes": dict(step.last_run.link_bytes),
                "predicted_s": step.plan.certificate.predicted_s,
                "planned_peak_bytes": step.last_run.peak_bytes["cpu"],
            }
            step.close()
        found["peak_bytes"] = peak.take_peak_bytes()
    return {**found, "losses": losses, "seconds": seconds}


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of one way in a process of its own; an error is a result, too."""
    command = [sys.executable, "-m", "benchmarks.packed_lora", "--way", way]
    command += ["--checkpoint", str(options.checkpoint), "--packed", str(options.packed)]
    command += ["--cache", str(options.cache), "--budget", options.budget]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    is_limited = way == "planned"
    limit_bytes = parse_size(options.budget) + PROCESS_BYTES if is_limited else _UNLIMITED_BYTES
    done = run_limited(command, limit_bytes, timeout_s=_LIMIT_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:500] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"limited": done.limited and is_limited}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ways, one after the other."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        options.cache = folder / "cache"
        if options.checkpoint is None:
            options.checkpoint = folder / "base"
            write_llama(options.checkpoint, _TOY if options.toy else SHAPE_1B)
        if options.packed is None:
            options.packed = folder / "model.gguf"
            write_file(options.checkpoint, options.packed)
        ways = {way: run(way, options) for way in _WAYS}
        return {
            "file_bytes": options.packed.stat().st_size,
            "ways": ways,
            "not_here": NOT_HERE,
        }


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table of the ways."""
    table = Table(title=f"GGUF file of {format_size(result['file_bytes'])}")
    for column in ("way", "until the first step", "its peak", "step", "peak in steps", "losses"):
        table.add_column(column)
    for way, found in result["ways"].items():
        if "error" in found:
            table.add_row(way, "-", "-", "-", "-", found["error"])
            continue
        table.add_row(
            way,
            f"{found['ready_s']:.1f} s",
            format_size(found["ready_peak_bytes"]),
            f"{statistics.median(found['seconds'][1:]):.3f} s",
            format_size(found["peak_bytes"]),
            f"{found['losses'][0]:.5f} to {found['losses'][-1]:.5f}",
        )
    console.print(table)


def main() -> int:
    """Measure, print and write the result; 0 where planned steps ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget", default="400MiB", help="of the planned way (default: 400MiB)")
    parser.add_argument("--tokens", type=int, default=256, help="of the one row (default: 256)")
    parser.add_argument("--steps", type=int, default=4, help="of each way (default: 4)")
    parser.add_argument("--checkpoint", type=Path, help="an fp32 Llama; by default random weights")
    parser.add_argument("--packed", type=Path, help="the same as a GGUF file; else it is made")
    parser.add_argument("--folder", type=Path, help="where checkpoint and caches are made")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--way", choices=_WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(work(options)), flush=True)
        return 0
    result = headed("packed_lora") | {"budget": options.budget, "tokens": options.tokens}
    result |= compare(options)
    console = Console()
    show(result, console)
    path = write_result(result, options.output)
    console.print(f"written: {path}")
    return int("error" in result["ways"]["planned"])


if __name__ == "__main__":
    sys.exit(main())
