"""Losses that ask a scheduler of torch's by its methods get today's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.training.trials import Trial

held: dict[str, Any] = {}


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).square().mean() * held["scheduler"].get_last_lr()[0]
    return value


def test_the_rate_of_today_is_told_by_a_method(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        held["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return held["scheduler"]

    torch.manual_seed(0)
    trial = Trial(
        nn.Linear(8, 8),
        loss_fn,
        [torch.randn(4, 8) for _ in range(4)],
        tmp_path,
        scheduler=scheduler,
    )
    trial.planned().assert_equals(trial.eager())
