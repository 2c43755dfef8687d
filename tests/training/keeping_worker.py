"""A small step to keep, and a process that trains it with a cache of others, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.training.trials import Result, Trial

CAPTURE = "gascompile.training.capture.joint.capture_joint"
PLAN = "gascompile.training.planning.step_plan.step_plan"


class MLP(nn.Module):
    """Two layers with dropout and a norm that counts."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.dropout(self.norm(functional.gelu(self.first(x)))))
        return found


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss with a constant that the trace makes of numbers."""
    weight = torch.tensor([0.5, 1.0, 1.5, 2.0])
    return functional.cross_entropy(model(batch[0]), batch[1], weight=weight)


def batches(count: int = 3, rows: int = 8) -> list[Any]:
    """Return batches that a seed stands for."""
    torch.manual_seed(5)
    return [(torch.randn(rows, 16), torch.randint(0, 4, (rows,))) for _ in range(count)]


def trial(cache: Path, model: nn.Module | None = None, **options: Any) -> Trial:
    torch.manual_seed(1)
    return Trial(model or MLP(), loss_fn, batches(), cache, options=options)


def shown(result: Result) -> str:
    """Return the losses, exactly."""
    return " ".join(float(loss).hex() for loss in result.losses)


@contextmanager
def neither_captured_nor_planned() -> Iterator[None]:
    """Let a capture or a solver be an error."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("captured or planned again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CAPTURE, refuse)
        patch.setattr(PLAN, refuse)
        yield


def main() -> None:
    """Train with the cache of the command line, and print the losses; with another word, from what is kept."""
    torch.set_num_threads(1)
    run = trial(Path(sys.argv[1]))
    with neither_captured_nor_planned() if sys.argv[2:] else nullcontext():
        sys.stdout.write(shown(run.planned()))
