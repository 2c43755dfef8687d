"""Batches in any memory format run the kernels that eager runs for it; gradients add up in eager's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.training.trials import Trial, adamw


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def mse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


FORMATS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(4, 3, 10, 10),
    "channels last": lambda: torch.randn(4, 3, 10, 10).to(memory_format=torch.channels_last),
    "turned": lambda: torch.randn(4, 10, 10, 3).permute(0, 3, 2, 1),
    "sliced": lambda: torch.randn(4, 6, 10, 20)[:, ::2, :, ::2],
    "expanded": lambda: torch.randn(1, 3, 10, 10).expand(4, -1, -1, -1),
}


def test_memory_formats_of_batches_are_eager(tmp_path: Path) -> None:
    """One step for all of them: each gets a plan of its own."""
    torch.manual_seed(0)
    batches = [(make(), torch.randint(0, 10, (4,))) for make in FORMATS.values()]
    trial = Trial(network(), cross_entropy, [*batches, *batches[:2]], tmp_path)
    trial.planned().assert_equals(trial.eager())


def test_a_model_in_another_memory_format_is_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(FORMATS["channels last"](), torch.randint(0, 10, (4,))) for _ in range(3)]
    model = network()
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    trial = Trial(model, cross_entropy, batches, tmp_path)
    trial.planned(trial.smallest_budget()).assert_equals(trial.eager())


class Tied(nn.Module):
    """One matrix under three names, used four times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(24, 24) for _ in range(3))
        self.two.weight = self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(self.one(x)))))
        found: torch.Tensor = self.three(x) @ self.one.weight.t()
        return found


class Alike(nn.Module):
    """Parameters with the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.randn(24)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one + self.two) * x + 2 * self.three


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    )


@pytest.mark.parametrize("kind", [Tied, Alike])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_tied_and_equal_gradients_are_eager(kind: Any, make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(6, 24), torch.randn(6, 24)) for _ in range(4)]
    trial = Trial(kind(), mse, batches, tmp_path, make)
    trial.planned().assert_equals(trial.eager())


def test_the_same_matrix_twice_in_a_sum_is_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model.one.weight + model.two.weight).square().sum()
        loss += model(batch).mean()
        return loss

    trial = Trial(Tied(), loss_fn, [torch.randn(6, 24) for _ in range(3)], tmp_path)
    trial.planned().assert_equals(trial.eager())
    trial = Trial(
        Tied(),
        loss_fn,
        [torch.randn(6, 24) for _ in range(4)],
        tmp_path,
        options={"accumulate": 2, "max_grad_norm": 1.0},
    )
    trial.planned(trial.smallest_budget()).assert_close(trial.eager(), 1e-6)
