"""Gradients that are there before a step takes parameters over: refused, and zeros are as none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import UnsupportedOpError
from gascompile.training.step import TrainingStep
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Compiler = Callable[..., TrainingStep]


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


@pytest.fixture
def step_of(tmp_path: Path) -> Iterator[Compiler]:
    steps = []

    def compiled(
        model: nn.Module, optimizer: torch.optim.Optimizer, *, unplanned: bool = False
    ) -> TrainingStep:
        step = gascompile.compile_step(
            model,
            squared,
            optimizer,
            "64MiB",
            machine=MACHINE,
            cache_dir=tmp_path,
            unplanned_optimizer=unplanned,
        )
        steps.append(step)
        return step

    yield compiled
    for step in steps:
        step.close()


@pytest.mark.parametrize("unplanned", [False, True])
def test_a_gradient_from_before_is_refused(step_of: Compiler, *, unplanned: bool) -> None:
    model, optimizer = made()
    squared(model, BATCH).backward()
    step = step_of(model, optimizer, unplanned=unplanned)
    with pytest.raises(UnsupportedOpError, match=r"'0.weight' has a gradient.*zero_grad\(\) first"):
        step(BATCH)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    eager, theirs = made()
    value = squared(eager, BATCH)
    value.backward()
    theirs.step()
    assert torch.equal(step(BATCH), value)
    step.close()
    for ours, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("unplanned", [False, True])
def test_zeros_are_as_none(step_of: Compiler, *, unplanned: bool) -> None:
    model, optimizer = made()
    squared(model, BATCH).backward()
    optimizer.zero_grad(set_to_none=False)
    eager, theirs = made()
    # A step that is closed, and another one on the same model.
    for _ in range(2):
        with step_of(model, optimizer, unplanned=unplanned) as step:
            for _ in range(2):
                theirs.zero_grad()
                value = squared(eager, BATCH)
                value.backward()
                theirs.step()
                torch.testing.assert_close(step(BATCH), value.detach())
    for ours, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, other)


def test_zeros_of_what_the_loss_does_not_use_would_be_an_update(step_of: Compiler) -> None:
    model, _ = made()
    other = nn.Linear(8, 8)
    model.register_module("other", other)
    model.forward = lambda x: model[2](model[0](x))  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other.weight.grad = torch.zeros(8, 8)
    step = step_of(model, optimizer)
    with pytest.raises(UnsupportedOpError, match=r"'other.weight' has a gradient of zeros"):
        step(BATCH)
    optimizer.zero_grad()
    step(BATCH)


def test_what_no_optimizer_has_may_have_a_gradient(step_of: Compiler) -> None:
    model, _ = made()
    first = model.get_submodule("0")
    optimizer = torch.optim.SGD(model.get_submodule("2").parameters(), lr=0.1)
    squared(model, BATCH).backward()
    optimizer.zero_grad()
    assert first.weight.grad is not None
    step = step_of(model, optimizer)
    step(BATCH)
