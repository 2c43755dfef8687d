"""Models of which parts need nothing of each other, and a machine of two processors to run them on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place
from gascompile.core.plan import OpPlan, Plan

WIDTH, ROWS = 64, 16
HOST_BUDGET = "96MiB"


def machine(*, cpu_flops: float = 1e9, rate: float = 1e9) -> Machine:
    """Return an emulated accelerator of 1 GFLOP/s beside a processor; memory costs nothing, to add in the head."""
    ends = (("cpu", "gpu"), ("gpu", "cpu"), ("nvme", "gpu"), ("nvme", "cpu"))
    return Machine(
        name="two processors",
        places=(
            Place.named("gpu", 1 << 26),
            Place.named("cpu", 1 << 30),
            Place.named("nvme", 1 << 40),
        ),
        links=tuple(
            Link(source_tier=a, target_tier=b, bandwidth_bytes_per_s=rate) for a, b in ends
        ),
        rates=(
            ComputeRate(device="gpu", dtype="float32", flops_per_s=1e9),
            ComputeRate(device="cpu", dtype="float32", flops_per_s=cpu_flops),
        ),
        memory=tuple(MemoryRate(device=d, bandwidth_bytes_per_s=1e15) for d in ("gpu", "cpu")),
        backend="emulated",
    )


class Towers(nn.Module):
    """Two halves that need nothing of each other, and what joins them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = b = x * 2.0
        for layer in self.left:
            a = torch.relu(layer(a))
        for layer in self.right:
            b = torch.relu(layer(b)).transpose(0, 1).contiguous().transpose(0, 1)
        return a + b, b


class Block(nn.Module):
    """Attention and a perceptron side by side, as in GPT-J, with a state and a random op that must stay."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        normed = self.norm(x)
        q, k, v = self.qkv(normed).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8.0, dim=-1)
        noise = torch.zeros_like(x).bernoulli_(0.5)
        inner = functional.gelu(self.up(normed))
        inner *= 0.5
        found: torch.Tensor = x + self.out(weights @ v) + self.down(inner) + noise + self.calls
        return found


def compiled(
    model: nn.Module, cache: Path, budget: int | str, where: Machine, sites: str = "all"
) -> gascompile.CompiledModel:
    both = gascompile.Budget(gpu=budget, cpu=HOST_BUDGET)
    inputs = (torch.zeros(ROWS, WIDTH),)
    return gascompile.compile(
        model, both, example_inputs=inputs, machine=where, cache_dir=cache, sites=sites, fuse="off"
    )


def sited(plan: Plan) -> dict[str, set[str]]:
    """Return the weights that the ops of each site read."""
    weights = {name for name, tensor in plan.tensors.items() if tensor.kind == "weight"}
    found: dict[str, set[str]] = {}
    for op, spec in zip(plan.ops, plan.workload.ops, strict=True):
        found.setdefault(op.site, set()).update(weights.intersection(spec.reads))
    return found


def eager(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def with_site(plan: Plan, sites: dict[str, str]) -> Plan:
    """Return a plan that runs some ops elsewhere, whether or not that can be."""
    ops = tuple(
        OpPlan(name=op.name, site=sites.get(op.name, op.site), time_s=op.time_s) for op in plan.ops
    )
    return dataclasses.replace(plan, ops=ops)
