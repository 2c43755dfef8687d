"""What pipelines train and run in tests, and one process beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.training.trials import TRANSFER_BYTES

NUM_STEPS = 3
WORDS, WIDTH, LENGTH, ROWS = 40, 32, 6, 8
TIGHT_BYTES = TRANSFER_BYTES + 250_000
"""The larger stage's step would take 315 kB beside transfers: its moments leave memory."""


class Block(nn.Module):
    """Attention over what came before, and a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide: torch.Tensor = self.down(functional.gelu(self.up(self.other_norm(x))))
        return x + wide


class TinyGPT(nn.Module):
    """Blocks between tied embeddings; a mask and positions that every stage makes for itself."""

    mask: torch.Tensor

    def __init__(self, *, ties: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties:
            self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask[: words.shape[1], : words.shape[1]])
        found: torch.Tensor = self.head(self.norm(x))
        return found


class Scaled(nn.Module):
    """Root mean squares and gates, as in Llama, with a frozen layer and a buffer that no state has."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.ups[1].weight.requires_grad_(False)
        offset = torch.full((WIDTH,), 0.1, device="cpu")  # also where the rest has no values
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.offset
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            y = norm(x)
            x = x + down(functional.silu(gate(y)) * up(y))
        found: torch.Tensor = self.head(x)
        return found


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    words, targets = batch
    return functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(own, lr=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """A model that stages train."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    budget: str | int = "64MiB"
    inference_budget: str = "128KiB"
    begins: Sequence[float] = ()
    """Where stages begin, as a part of all ops; chosen where it is empty."""
    num_batches: int = 4
    options: dict[str, Any] = field(default_factory=dict)


PIPED: dict[str, Piped] = {
    "gpt": Piped(model=TinyGPT, begins=(0, 0.3), budget=TIGHT_BYTES),
    "llama": Piped(
        model=Scaled, begins=(0, 0.6), num_batches=2, optimizer=sgd, options={"max_grad_norm": 0.5}
    ),
    "loss alone": Piped(
        model=Scaled, begins=(0, 0.99), num_batches=2, optimizer=sgd, options={"max_grad_norm": 0.5}
    ),
}


def batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    words = [torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]
    return [[of[:, :-1].contiguous(), of[:, 1:].contiguous()] for of in words]


def train_eagerly(piped: Piped) -> tuple[list[torch.Tensor], nn.Module, torch.optim.Optimizer]:
    """Return the losses of one process, that of an evaluation last, and what it came to."""
    torch.manual_seed(0)
    model = piped.model()
    optimizer = piped.optimizer(model)
    losses = []
    for batch in batches():
        loss = loss_fn(model, batch)
        loss.backward()
        if limit := piped.options.get("max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        losses.append(loss_fn(model, batches()[0]))
    return losses, model, optimizer
