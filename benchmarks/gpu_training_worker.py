"""One contender of the benchmark of training on a GPU, in a process of its own; prints one JSON object per row.

All contenders train the same random Llama on the same batches with the same optimizer. Its attention is plain ops:
GASCompile captures on the processor, whose fused attention a GPU does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import resource
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_here import device_here, finish, has_gpu, reset_peak
from benchmarks.gpu_models import SHAPES, empty_llama, random_weights
from benchmarks.training_contenders import LEARNING_RATE, Trainer, trainer_of

# Planned steps train float32, so all do, by exact products: about 50 TFLOP/s on an H100. Half a billion weights of
# it, with gradients and moments, are 7 GiB: building, pinning and filling that takes seconds. A step of 1,024 tokens
# computes for some 60 ms, about as long as moving what a half or a quarter of eager's memory does not hold.
TRAINED: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 16000,
    },
    "toy": SHAPES["toy"],
}
BATCHES = {"0.5B": (2, 512), "toy": (2, 32)}
"""Sequences, and tokens of each."""
HOST = "32GiB"
PLANNING_S = {"0.5B": 10.0, "toy": 1.0}
_WARM_STEPS = 4
"""CUDA graphs begin with the third or fourth step of a kind."""
_COMPARED = 5


def main() -> None:
    """Run the contender named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(CONTENDERS))
    parser.add_argument("--shape", choices=sorted(TRAINED), default="toy")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--budgets", nargs="+", type=int, default=[], help="bytes of the GPU")
    parser.add_argument("--machine", help="without it this machine, measured")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.machine is not None:
        # As benchmarks.emulated does: other processes have the rest.
        torch.set_num_threads(1)
    rows = CONTENDERS[options.contender]
    for budget_bytes in options.budgets or [None]:
        given = {"budget_bytes": budget_bytes} if budget_bytes is not None else {}
        try:
            row = rows(options, **given)
        except Exception as error:  # noqa: BLE001 - the next budget has its own chance
            row = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps({**given, **row}), flush=True)
        gc.collect()
        if has_gpu():
            # What products work in would count as the next row's.
            torch._C._cuda_clearCublasWorkspaces()


def build_model(shape: str) -> nn.Module:
    """Return the Llama in CPU memory, in float32 and with the same weights in every process."""
    model: Any = empty_llama(TRAINED[shape]).float()
    model.set_attn_implementation("eager")
    model.load_state_dict(dict(random_weights(model)), strict=False, assign=True)
    made: nn.Module = model.train()
    return made


def batch_of(shape: str, number: int) -> torch.Tensor:
    """Return the token ids of a step: ``[batch, tokens]``, random, the same for every contender."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, TRAINED[shape]["vocab_size"], BATCHES[shape], generator=generator)


def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each next token."""
    # A mask of four dimensions is taken as it is and added to scores; without one, transformers looks into values.
    tokens, lowest = ids.shape[1], torch.finfo(torch.float32).min
    mask = torch.full((1, 1, tokens, tokens), lowest, device=ids.device).triu(1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer whose kernel planned updates call."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def eager(options: argparse.Namespace) -> dict[str, Any]:
    """Everything in the GPU's memory, as PyTorch does it."""
    model = build_model(options.shape).to(device_here())
    return _trained(_plain(model), options)


def checkpointed(options: argparse.Namespace) -> dict[str, Any]:
    """The same with ``torch.utils.checkpoint`` around each block."""
    model: Any = build_model(options.shape).to(device_here())
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return _trained(_plain(model), options)


def fsdp2(options: argparse.Namespace) -> dict[str, Any]:
    """``fully_shard`` over one rank, with parameters, gradients and updates on the host."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    # The rank talks to itself; machines without a network have this interface alone.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu() else "gloo",
        init_method=f"file://{options.scratch.absolute() / f'ranks-{os.getpid()}'}",
        rank=0,
        world_size=1,
    )
    try:
        mesh = init_device_mesh(device_here().type, (1,))
        policy = CPUOffloadPolicy(pin_memory=has_gpu())
        model: Any = build_model(options.shape)
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh, offload_policy=policy)
        return _trained(_plain(model), options)
    finally:
        distributed.destroy_process_group()


def planned(options: argparse.Namespace, budget_bytes: int, *, sites: str) -> dict[str, Any]:
    """Measure one budget under GASCompile."""
    from gascompile import compile_step
    from gascompile.core.budget import Budget

    model = build_model(options.shape)
    reset_peak()
    start_s = time.perf_counter()
    with compile_step(
        model,
        loss_fn,
        adamw(model),
        Budget(gpu=budget_bytes, cpu=HOST),
        batch_of(options.shape, 0),
        machine=options.machine,
        cache_dir=options.scratch / "cache",
        graphs="auto",
        sites=sites,
        time_limit_s=PLANNING_S[options.shape],
    ) as step:
        compile_s = time.perf_counter() - start_s
        compile_peak_bytes = _peak_bytes()
        row = _trained(Trainer(step=step), options)
        row |= {"compile_s": compile_s, "compile_peak_bytes": compile_peak_bytes, **_said(step)}
    return row


def _plain(model: nn.Module) -> Trainer:
    device = device_here()
    return trainer_of(lambda batch: loss_fn(model, batch.to(device)), adamw(model))


def _trained(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Return what steps take after some that are not counted, and their losses."""
    reset_peak()
    losses, times_s, peaks_bytes = [], [], []
    for number in range(_WARM_STEPS + options.runs):
        batch = batch_of(options.shape, number)
        finish()
        start_s = time.perf_counter()
        losses.append(float(trainer.step(batch)))
        finish()
        times_s.append(time.perf_counter() - start_s)
        # A planned run begins to count anew.
        peaks_bytes.append(_peak_bytes())
    return {
        "warm_s": times_s[:_WARM_STEPS],
        "times_s": times_s[_WARM_STEPS:],
        "median_s": statistics.median(times_s[_WARM_STEPS:]),
        "losses": losses[:_COMPARED],
        "allocated_peak_bytes": max(peaks_bytes) if has_gpu() else None,
        # Of the whole process, pinned memory and libraries included; the kernel counts KiB.
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _said(step: Any) -> dict[str, Any]:
    """Return what the plan and the last run say of themselves."""
    from gascompile.core.serial import to_json

    plan, run = step.plan, step.last_run
    tier = plan.machine.compute_tier
    certificate = plan.certificate
    return {
        "machine": plan.machine.name,
        "profile": to_json(plan.machine),
        "budgets_bytes": dict(plan.budget_bytes),
        "planned_peak_bytes": dict(plan.peak_bytes),
        "measured_peak_bytes": dict(run.peak_bytes),
        "peak_source": run.peak_source,
        "predicted_s": certificate.predicted_s,
        "bound_s": certificate.lower_bound_s,
        "binding": certificate.binding,
        "gap": certificate.gap,
        "solve_s": certificate.solve_s,
        "strategy": plan.strategy,
        "link_bytes": dict(run.link_bytes),
        "planned_link_bytes": dict(plan.link_bytes),
        "stall_s": run.stall_s,
        "site_s": dict(run.site_s),
        "paths": dict(run.paths),
        "num_ops": len(plan.ops),
        "host_ops": [op.name for op in plan.ops if op.site not in (None, tier)],
        "graphs": dataclasses.asdict(step.graphs) if step.graphs else None,
    }


def _peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if has_gpu() else 0


CONTENDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "eager": eager,
    "gascompile": functools.partial(planned, sites="one"),
    "gascompile-hybrid": functools.partial(planned, sites="all"),
    "fsdp2": fsdp2,
    "checkpoint": checkpointed,
}

if __name__ == "__main__":
    main()
