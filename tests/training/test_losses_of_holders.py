"""Losses that are methods of an object which holds its own step: what runs the step is no part of what is compared."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.capture.fingerprint.fingerprint import ModulePrint, step_print
from gascompile.core.machinery import Machinery
from tests.training.trials import MACHINE

BATCHES = [torch.ones(rows, 4) for rows in (2, 3, 2, 5)]


class Plain:
    """Holds what cannot be compared."""

    def __init__(self) -> None:
        self.asked = queue.SimpleQueue[int]()


class Runs(Plain, Machinery):
    """The same, of what runs a step."""


class Holder:
    """As trainers are made: the step and the optimizer are attributes of what has the loss."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.factor, self.folder = 2.0, folder
        self.step: Any = None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return (model(batch) * self.factor).square().mean()

    def __enter__(self) -> Self:
        self.step = compile_step(
            self.model, self.loss, self.optimizer, "8MiB", BATCHES[0],
            machine=MACHINE, cache_dir=self.folder,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.step.close()


def test_a_step_is_named_and_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opaque: list[tuple[str, ...]] = []

    def printed(*args: Any, **options: Any) -> ModulePrint:
        found = step_print(*args, **options)
        opaque.append(found.opaque)
        return found

    monkeypatch.setattr("gascompile.training.step_cache.step_print", printed)
    with Holder(tmp_path) as held:
        for batch in BATCHES:
            held.step(batch)
    first, few, many = opaque
    assert not first, "it has no step yet"
    assert many == few
    assert any(what.endswith("step is a TrainingStep") for what in few), few
    assert len(few) < 10, few


def test_nothing_of_what_runs_a_step_is_asked() -> None:
    held = Holder(Path())
    for step, what in ((Runs(), "step is a Runs"), (Plain(), "step.asked is a _queue.SimpleQueue")):
        held.step = step
        (found,) = step_print(held.model, held.loss).opaque
        assert found.endswith(what)


def test_losses_of_a_holder_follow_it(tmp_path: Path) -> None:
    """Beside the same in eager, with a factor that changes once and a new kind of batch after it."""
    eager, expected, found = Holder(tmp_path), [], []
    with Holder(tmp_path) as held:
        for number, batch in enumerate(BATCHES):
            eager.factor = held.factor = 1.0 + (number > 1)
            loss = eager.loss(eager.model, batch)
            loss.backward()
            eager.optimizer.step()
            eager.optimizer.zero_grad()
            expected.append(loss.item())
            found.append(held.step(batch).item())
    assert found == pytest.approx(expected, rel=1e-6)
    for value, other in zip(held.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(value, other)
