"""Models after a step, open or in plain torch, for tests that touch both alike."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gascompile.training.step import TrainingStep
from tests.training.runs import TinyGPT, adamw, batches, compiled, loss_fn, new_model, plain_step

NAME = "blocks.0.up.weight"


class Trained:
    """A model after a step, open or in plain torch."""

    def __init__(self, model: TinyGPT, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step: TrainingStep | None = None

    @property
    def weight(self) -> Any:
        return self.model.get_parameter(NAME)

    @property
    def mean(self) -> Any:
        return self.model.get_buffer("norm.running_mean")


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def forward(trained: Trained) -> Any:
    trained.model.eval()
    with torch.no_grad():
        found = loss_fn(trained.model, batches(1)[0])
    trained.model.train()
    return found


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, np.ndarray):
        assert np.array_equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where} {key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, value in enumerate(theirs):
            assert_same(ours[number], value, f"{where} {number}")
    else:
        assert str(ours) == str(theirs), where


def trained_in_torch() -> Trained:
    """Return a model after a step in plain torch."""
    model = new_model().train()
    trained = Trained(model, adamw(model))
    torch.manual_seed(5)
    plain_step(model, trained.optimizer, batches(1)[0])
    trained.optimizer.zero_grad()
    return trained


@contextmanager
def trained_and_open(folder: Path) -> Iterator[Trained]:
    """Yield the same model while its step is open."""
    model = new_model().train()
    trained = Trained(model, adamw(model))
    with compiled(model, trained.optimizer, folder) as trained.step:
        torch.manual_seed(5)
        trained.step(batches(1)[0])
        yield trained
