"""Batch normalisation of odd kinds has eager's bits: means of all batches, inputs that lie across memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import CaptureError
from tests.training.trials import MACHINE, Trial, adamw


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


class Cumulative(nn.Module):
    """One norm of all batches is used twice in a step, under two names; another has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm = self.again = nn.BatchNorm1d(12, momentum=None)
        self.other = nn.BatchNorm1d(12, momentum=None, affine=False)
        self.plain = nn.BatchNorm1d(12, momentum=None, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.two(self.norm(self.one(x)))))
        found: torch.Tensor = torch.tanh(self.plain(self.other(x).square()))
        return found


def test_means_of_all_batches_are_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trial = Trial(Cumulative(), mean_square, [torch.randn(6, 12) for _ in range(4)], tmp_path)
    eager = trial.eager()
    assert eager.state["norm.num_batches_tracked"] == 8
    trial.planned().assert_equals(eager)
    trial.planned(trial.smallest_budget()).assert_equals(eager)


def test_evaluation_uses_the_means_of_all_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Cumulative(), torch.randn(6, 12)
    with compile_step(
        model, mean_square, adamw(model), None, batch, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        step(batch)
        found = step.eval(batch)
    assert model.norm.momentum is None
    model.eval()
    assert torch.equal(found, mean_square(model, batch).detach())


def test_norms_that_count_otherwise_are_refused(tmp_path: Path) -> None:
    class Twice(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.mul_(2)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(12, 12), Twice(12, momentum=None))
    with pytest.raises(CaptureError, match=r"'1' has momentum=None.*give it a momentum"):
        compile_step(
            model,
            mean_square,
            adamw(model),
            None,
            torch.randn(6, 12),
            machine=MACHINE,
            cache_dir=tmp_path,
        )
    norm: Any = model[1]
    assert norm.momentum is None


class Across(nn.Module):
    """Normalises what lies across memory, and looks at the result in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(16, 64), nn.Linear(64, 8), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x).view(-1, 4, 4, 4).transpose(1, 2)).transpose(1, 3)
        found: torch.Tensor = self.two(x.flatten(1))
        return found


class Turned(nn.Module):
    """Normalises a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(16, 8), nn.Linear(8, 8), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.norm(self.one(x).t()).t())
        return found


class Swapped(nn.Module):
    """Normalises a tensor of three dimensions of which the outer two are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(16, 8), nn.Linear(8, 8), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x).view(4, 8, 8).transpose(0, 1))
        found: torch.Tensor = self.two(x.view(32, 8))
        return found


@pytest.mark.parametrize("make", [Across, Turned, Swapped])
def test_transposed_inputs_are_eager(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trial = Trial(make(), mean_square, [torch.randn(32, 16) for _ in range(4)], tmp_path)
    trial.planned().assert_equals(trial.eager())
