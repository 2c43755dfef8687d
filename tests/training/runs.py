"""A small language model to train, a machine by hand, and the same run in plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gascompile import TrainingStep, compile_step
from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place
from gascompile.training.capture.traced_loss import LossFunction

BUDGET_BYTES = (4 << 20) + 650_000
"""Four MiB of transfer buffers, and less than the states of ``TinyGPT``."""
PLANNING_S = 0.2
"""Tests look at what comes out, not at how fast the plan is: without an end, most searches use all they get."""
MACHINE = Machine(
    name="by hand",
    places=(Place.named("cpu", 1 << 34), Place.named("nvme", 1 << 40)),
    links=(
        Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=3e9, latency_s=1e-4),
        Link(source_tier="cpu", target_tier="nvme", bandwidth_bytes_per_s=3e9, latency_s=1e-4),
    ),
    rates=(ComputeRate(device="cpu", dtype="float32", flops_per_s=1e11),),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=2e10, op_overhead_s=4e-6),),
)


class Block(nn.Module):
    """Attention over what came before, and a wide layer; dropout after both."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        wide = self.down(functional.gelu(self.up(self.other_norm(x))))
        return x + functional.dropout(wide, self.dropout, self.training)


class TinyGPT(nn.Module):
    """Blocks between tied embeddings, and a running mean that each training batch changes."""

    def __init__(self, width: int = 64, dropout: float = 0.1, blocks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x.flatten(0, 1)))
        return found


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return how badly the next tokens were guessed."""
    return functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())


def new_model(seed: int = 1, *, width: int = 64) -> TinyGPT:
    """Return the model that a seed stands for."""
    torch.manual_seed(seed)
    return TinyGPT(width)


def freeze(model: TinyGPT) -> None:
    """Leave one matrix as it is, so that checkpoints have something to link."""
    model.blocks[0].get_submodule("qkv").requires_grad_(False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose kernels are the ones of a compiled step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, fused=True)


def batches(count: int, *, rows: int = 4) -> list[torch.Tensor]:
    """Return batches of tokens, the same at each call."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 512, (rows, 17), generator=generator) for _ in range(count)]


def compiled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    budget: int | str = BUDGET_BYTES,
    checkpoint: Path | None = None,
    **options: Any,
) -> TrainingStep:
    """Return a step that is planned for ``batches``."""
    return compile_step(
        model,
        loss_fn,
        optimizer,
        budget,
        batches(1)[0],
        machine=MACHINE,
        checkpoint=checkpoint,
        cache_dir=folder / "cache",
        time_limit_s=PLANNING_S,
        **options,
    )


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Take a step in plain torch and return its loss."""
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def plain_losses(count: int, *, seed: int = 5) -> list[float]:
    """Return the losses of a run in plain torch that begins with ``torch.manual_seed(seed)``."""
    with torch.random.fork_rng(devices=[]):
        model = new_model().train()
        optimizer = adamw(model)
        torch.manual_seed(seed)
        return [plain_step(model, optimizer, batch) for batch in batches(count)]


def losses(step: TrainingStep, begin: int, end: int) -> list[float]:
    """Return the losses of a step on some of ``batches``."""
    return [float(step(batch)) for batch in batches(end)[begin:]]


class Own(torch.autograd.Function):
    """Has a backward pass of its own, which nothing can be compared with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Double."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Double."""
        return gradient * 2


def doubling(loss: LossFunction) -> LossFunction:
    """Return the loss through ``Own``."""

    def doubled(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = Own.apply(loss(model, batch))  # type: ignore[no-untyped-call]  # torch's
        return found

    return doubled


CRASH_RUNS = int(os.environ.get("GASCOMPILE_CRASH_RUNS", "4"))
"""How often a run is killed."""
