"""What ranks train in tests, and eager over the whole batch beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

NUM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model with an optimizer, trained by ranks of ``rows`` rows each."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    rows: Sequence[int] = ()
    """Per rank; four each where it is empty."""
    budget: str = "64MiB"
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
    "sgd": Scenario(
        model=Tied,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        options={"max_grad_norm": 0.05, "accumulate": 2, "rows": "equal"},
    ),
    "batch norm": Scenario(
        model=normed, optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3), rows=(3, 5, 2, 2)
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
