"""A machine whose accelerator is emulated, by hand, and budgets of it that use all of its tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gascompile import TrainingStep, compile_step
from gascompile.core.budget import Budget
from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place
from gascompile.runtime.memory.host_slots import HOST_BYTES
from tests.training.runs import PLANNING_S, batches, loss_fn


def link(source: str, target: str, rate: float) -> Link:
    """Return a link that is quick, so that tests are."""
    return Link(source_tier=source, target_tier=target, bandwidth_bytes_per_s=rate, latency_s=1e-5)


EMULATED = Machine(
    name="an accelerator by hand",
    places=(Place.named("gpu", 1 << 26), Place.named("cpu", 1 << 34), Place.named("nvme", 1 << 40)),
    links=(
        link("cpu", "gpu", 8e9),
        link("gpu", "cpu", 6e9),
        link("nvme", "gpu", 3e9),
        link("gpu", "nvme", 3e9),
    ),
    rates=(ComputeRate(device="gpu", dtype="float32", flops_per_s=1e11),),
    memory=(MemoryRate(device="gpu", bandwidth_bytes_per_s=2e10, op_overhead_s=4e-6),),
    backend="emulated",
)
SMALL = Budget(gpu=850_000, cpu=HOST_BYTES + 350_000)
"""Less than the states of ``TinyGPT``, and a host that has room for a part of what leaves."""


def on_device(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: Any
) -> TrainingStep:
    """Return a step that is planned for ``batches`` and the small budget."""
    options = {"loss_fn": loss_fn, "budget": SMALL, "machine": EMULATED, **options}
    return compile_step(
        model,
        optimizer=optimizer,
        example_batch=batches(1)[0],
        cache_dir=folder / "cache",
        time_limit_s=PLANNING_S,
        **options,
    )
