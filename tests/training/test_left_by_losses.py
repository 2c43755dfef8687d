"""What a loss leaves behind beside its value: on itself, and in its batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from tests.training.trials import MACHINE

BATCH = (torch.ones(4, 16), torch.zeros(4, 8))


class Keeping:
    """Keeps the last loss for a log."""

    def __init__(self) -> None:
        self.last = torch.tensor(-1.0)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = functional.mse_loss(model(batch[0]), batch[1])
        self.last, self.more = loss.detach(), [loss]
        return loss

    def method(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self(model, batch)


def given(keeping: Keeping, model: nn.Module, batch: Any) -> torch.Tensor:
    return keeping(model, batch)


FORMS: list[Callable[[Keeping], Callable[..., torch.Tensor]]] = [
    lambda keeping: keeping, lambda keeping: keeping.method, lambda keeping: partial(given, keeping),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_what_a_loss_keeps_is_what_it_was(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not a tensor of the trace, which raises where it is used."""
    torch.manual_seed(0)
    model, keeping = nn.Linear(16, 8), Keeping()
    loss_fn, optimizer = FORMS[number](keeping), torch.optim.SGD(model.parameters(), lr=0.1)
    with compile_step(
        model, loss_fn, optimizer, "8MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        step(BATCH)
    assert float(keeping.last) == -1.0
    assert not hasattr(keeping, "more")
    assert "Keeping.last, Keeping.more" in caplog.text


def halving(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["x"] = batch["x"] / 2
    return functional.mse_loss(model(batch["x"]), batch["y"])


def test_a_batch_that_a_loss_changes_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 8), {"x": BATCH[0], "y": BATCH[1]}
    expected = halving(model, dict(batch)).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with compile_step(
        model, halving, optimizer, "8MiB", batch, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        found = [step(batch), step(batch)]
    assert all(torch.equal(loss, expected) for loss in found)
    assert "changes a list or dict of its batch" in caplog.text
