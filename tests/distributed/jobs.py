"""What ranks train in tests, and eager over the whole batch beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from gascompile.core.budget import Budget
from gascompile.training.optimizers.slots import Stage

FilledOnce: TypeAlias = Callable[[str, Callable[[Path], None]], Path]
"""The fixture ``filled_once``: gives a folder of all workers, by its name and by what fills it."""
NUM_STEPS = 5
WIDE_BYTES = (4 << 20) + (42 << 18)
"""Transfer buffers; of ``wide`` half of the moments, half of the parameters, and a gradient of 1 MiB with what its
exchange takes, 2.5 MiB. All parameters would be 2 MiB more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model with an optimizer, trained by ranks of ``rows`` rows each."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    rows: Sequence[int] = ()
    """Per rank; four each where it is empty."""
    budget: str | Budget = "64MiB"
    stage: Stage | Literal["whole"] | None = None
    """Of all parameters that can be divided, where that is not to be chosen."""
    overlaps: bool | None = None
    """Whether gradients are summed beside ops, where that is not to be chosen."""
    lr: float = 0.01
    width: int = 48
    options: dict[str, Any] = field(default_factory=dict)


class Tied(nn.Module):
    """Two layers that share a weight, one that lies transposed, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 1024)
        self.inner = nn.Linear(1024, 48)
        self.inner.weight = nn.Parameter(self.first.weight.detach().t())
        self.again = nn.Linear(48, 1024, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.LayerNorm(1024)
        self.last = nn.Linear(1024, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.relu(self.first(x)))
        found: torch.Tensor = self.last(self.norm(self.again(x)))
        return found


class Twice(nn.Module):
    """A weight that is used twice, one that lies transposed in memory of its own, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 1024)
        self.inner = nn.Linear(1024, 48)
        self.inner.weight = nn.Parameter(self.inner.weight.detach().t().contiguous().t())
        self.again = nn.Linear(48, 1024, bias=False)
        self.again.weight = self.first.weight
        self.fixed = nn.Linear(1024, 64)
        self.fixed.weight.requires_grad_(False)
        self.last = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.relu(self.first(x)))
        found: torch.Tensor = self.last(self.fixed(torch.relu(self.again(x))))
        return found


class Dropping(nn.Module):
    """Random numbers for rows in the first dimension, in a later one, in a part of one, and for none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.inner = nn.Linear(64, 1024)
        self.last = nn.Linear(1024, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drop = nn.functional.dropout
        heads = self.first(x).view(-1, 4, 4, 4)
        scores = (heads @ heads.transpose(-1, -2)).softmax(-1)
        merged = drop(scores, 0.2).flatten(0, 1) @ heads.flatten(0, 1)
        merged = drop(merged, 0.3)  # of rows times heads
        x = merged.view(-1, 4, 16).transpose(0, 1)
        x = drop(x, 0.1).contiguous()
        x = drop(x + torch.randn_like(x) * 0.1, 0.1).transpose(
            0, 1
        )  # of rows in the second dimension
        x = nn.functional.dropout1d(x, 0.3).flatten(1)
        x = drop(self.inner(x), 0.3)
        x = x * x.new_empty(len(x), 1).bernoulli_(0.8)
        weight = drop(self.last.weight, 0.1)
        found: torch.Tensor = nn.functional.linear(x, weight, self.last.bias)
        return found


def wide() -> nn.Module:
    """Weights of 1 MiB each."""
    layers = [nn.Linear(48, 512), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(512, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 3))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1024), nn.Linear(1024, 3)
    )


SCENARIOS: dict[str, Scenario] = {
    "adamw": Scenario(
        model=plain, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3), rows=(3, 6, 1, 2)
    ),
    "beside": Scenario(
        model=plain,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        rows=(3, 6, 1, 2),
        overlaps=True,
    ),
    "sgd": Scenario(
        model=Tied,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        options={"max_grad_norm": 0.05, "accumulate": 2, "rows": "equal"},
    ),
    "batch norm": Scenario(
        model=normed, optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3), rows=(3, 5, 2, 2)
    ),
    "dropout": Scenario(
        model=Dropping,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        rows=(3, 6, 1, 2),
        options={"accumulate": 2},
    ),
    "kept": Scenario(
        model=plain,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        rows=(3, 6, 1, 2),
        stage="kept",
    ),
    "again": Scenario(
        model=Twice,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        stage="again",
        options={"max_grad_norm": 0.05, "accumulate": 2, "rows": "equal"},
    ),
    "chosen": Scenario(
        model=wide,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        budget=Budget(cpu=WIDE_BYTES, nvme=0),
        lr=1e-3,
    ),
}


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def net_of(scenario: Scenario) -> nn.Module:
    return scenario.model()


def optimizer_of(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    return scenario.optimizer(model.parameters())


def rows_of(scenario: Scenario, size: int) -> list[int]:
    return list(scenario.rows[:size]) if scenario.rows else [4] * size


def batches(scenario: Scenario, size: int = 2) -> list[list[torch.Tensor]]:
    """Return the global batches, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    count = sum(rows_of(scenario, size))
    return [
        [
            torch.randn(count, scenario.width, generator=generator),
            torch.randint(0, 3, (count,), generator=generator),
        ]
        for _ in range(NUM_STEPS)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What eager came to on whole batches."""

    losses: list[torch.Tensor]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    next_losses: list[torch.Tensor]
    """Of two steps more."""


def eager(scenario: Scenario, size: int = 2) -> Outcome:
    """Train on whole batches, as one would without ranks."""
    torch.manual_seed(0)
    model = scenario.model()
    optimizer = optimizer_of(scenario, model)
    accumulate = scenario.options.get("accumulate", 1)
    losses, number = [], 0

    def step(batch: Any) -> torch.Tensor:
        nonlocal number
        loss = loss_fn(model, batch)
        loss.backward()
        number += 1
        if number % accumulate == 0:
            if limit := scenario.options.get("max_grad_norm"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for index, batch in enumerate(batches(scenario, size)):
        for group in optimizer.param_groups:
            group["lr"] = scenario.lr / (1 + index)
        losses.append(step(batch))
    model.eval()
    with torch.no_grad():
        losses.append(loss_fn(model, batches(scenario, size)[0]))
    model.train()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return Outcome(losses, *state, [step(batch) for batch in batches(scenario, size)[:2]])
