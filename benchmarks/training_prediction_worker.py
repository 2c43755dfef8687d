"""One plan of ``training_prediction`` in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.throttled import throttled
from benchmarks.training_contenders import batch_of, build_model, loss_fn, optimizer_of
from gascompile import compile_step
from gascompile.core.plan import Plan
from gascompile.core.steps import Recompute

LLAMA = {"batch": 8, "tokens": 256, "vocab_size": 32000}


def case_of(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model and batches."""
    if name != "llama-60m":
        return build_model(name), [batch_of(name, number) for number in range(8)]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=LLAMA["vocab_size"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    size = (LLAMA["batch"], LLAMA["tokens"])
    batches = [torch.randint(0, LLAMA["vocab_size"], size) for _ in range(8)]
    return LlamaForCausalLM(config).train(), batches


def llama_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each next token."""
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def facts(plan: Plan) -> dict[str, Any]:
    """Return what a plan decides."""
    device = plan.machine.compute_tier
    again = [plan.workload.ops[s.source] for s in plan.steps if isinstance(s, Recompute)]
    return {
        "strategy": plan.strategy,
        "predicted_s": plan.certificate.predicted_s,
        "gap": plan.certificate.gap,
        "num_recomputed": len(again),
        "recomputed_s": sum(op.time_s[device] for op in again),
        "moved_bytes": sum(plan.link_bytes.values()),
        "link_bytes": dict(plan.link_bytes),
        "peak_bytes": plan.peak_bytes[device],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the plan says, and seconds of its steps."""
    torch.set_num_threads(2)
    model, batches = case_of(options.model)
    with compile_step(
        model,
        llama_loss if options.model.startswith("llama") else loss_fn,
        optimizer_of(model),
        options.budget,
        batches[0],
        machine=options.machine,
        time_limit_s=20.0,
    ) as step:
        assert step.plan is not None
        speed = options.disk_bytes_per_s
        drive = throttled(options.scratch, speed) if speed else contextlib.nullcontext()
        times_s, stalls_s = [], []
        with drive:
            for number in range(options.steps + 2):
                start_s = time.perf_counter()
                step(batches[number % len(batches)])
                times_s.append(time.perf_counter() - start_s)
                assert step.last_run is not None
                stalls_s.append(step.last_run.stall_s)
        return {
            **facts(step.plan),
            "times_s": times_s[2:],
            "median_s": statistics.median(times_s[2:]),
            "stall_s": statistics.median(stalls_s[2:]),
        }


def main() -> None:
    """Run the plan named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["gpt2", "llama-60m", "toy"])
    parser.add_argument("--budget", required=True)
    parser.add_argument("--machine", required=True, help="file of the machine")
    parser.add_argument("--disk-bytes-per-s", type=float, help="speed to hold the drive to")
    parser.add_argument("--scratch", type=Path, required=True, help="folder on that drive")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
