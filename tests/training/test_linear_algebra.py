"""Linear algebra that checks what it computes: the values of eager, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gascompile
from gascompile.core.errors import CaptureError
from gascompile.training.step import TrainingStep
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def step_of(model: nn.Module, loss: Loss, batch: torch.Tensor, folder: Path) -> TrainingStep:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return gascompile.compile_step(
        model, loss, optimizer, "64MiB", batch, machine=MACHINE, cache_dir=folder
    )


def weight_of(model: nn.Module) -> torch.Tensor:
    assert isinstance(model, nn.Linear)
    return model.weight


def definite(model: nn.Module) -> torch.Tensor:
    weight = weight_of(model)
    return weight @ weight.t() + torch.eye(8)


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (
        torch.linalg.inv(definite(model)).sum()
        + torch.linalg.solve(definite(model), batch, left=False).sum()
    )
    return value


LOSSES: dict[str, Loss] = {
    "inv": lambda model, _: torch.linalg.inv(definite(model)).sum(),
    "solve": lambda model, batch: torch.linalg.solve(definite(model), batch.t()).sum(),
    "cholesky": lambda model, _: torch.linalg.cholesky(definite(model)).sum(),
    "lu": lambda model, _: torch.linalg.lu_factor(definite(model))[0].sum(),
    "checkpoint": lambda model, _: checkpoint(
        lambda: torch.linalg.inv(definite(model)).sum(), use_reentrant=False
    ),
    "twice": twice,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_values_are_those_of_eager(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    ours, eager = nn.Linear(8, 8), nn.Linear(8, 8)
    eager.load_state_dict(ours.state_dict())
    theirs = torch.optim.SGD(eager.parameters(), 0.01)
    with step_of(ours, LOSSES[kind], BATCH, tmp_path) as step:
        for _ in range(3):
            wanted = LOSSES[kind](eager, BATCH)
            wanted.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(step(BATCH), wanted.detach())
    torch.testing.assert_close(ours.weight, eager.weight)


def test_a_matrix_without_inverse_raises_and_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    model.weight.data = torch.eye(8)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = torch.linalg.inv(weight_of(model) * batch).sum()
        return value

    with step_of(model, loss, torch.ones(8, 8), tmp_path) as step:
        with pytest.raises(RuntimeError, match="singular"):
            step(torch.zeros(8, 8))
        assert torch.equal(model.weight, torch.eye(8))
        assert float(step(torch.ones(8, 8))) == 8


def test_other_effects_are_named(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._print("here")
        value: torch.Tensor = model(batch).sum()
        return value

    with pytest.raises(CaptureError, match=r"the loss calls aten\._print"):
        step_of(nn.Linear(8, 8), loss, BATCH, tmp_path)
