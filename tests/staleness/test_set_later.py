"""Attributes that code asks for, and that get there, or go away, after its capture, on values of any kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile import compile_step
from tests.training.trials import MACHINE

X = torch.ones(2, 3)


class Slots:
    """One slot, which is empty."""

    __slots__ = ("scale",)


class Plain:
    """Nothing yet."""


class Entries(dict[str, float]):
    """A dictionary that may have attributes."""


def function() -> Callable[[], int]:
    return lambda: 0


KINDS: list[Callable[[], Any]] = [
    Slots, Plain, Entries, function, partial(partial, print), partial(type, "Made", (), {}), partial(torch.ones, 2),
]  # fmt: skip


class Asking(nn.Module):
    """Asks for an attribute that may not be there."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(3, 3), of

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * getattr(self.of, "scale", 1.0)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_what_is_set_later_counts(number: int, trains: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Asking(KINDS[number]()).train(trains)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    weights = [value.detach().clone() for value in model.layer.parameters()]
    planned: Any = (
        compile_step(model, loss_fn, optimizer, "8MiB", X, **options)
        if trains
        else gascompile.compile(model, "8MiB", (X,), **options)
    )
    with planned:
        for scale in (1.0, 3.0, 4.0, None, 5.0):
            if scale is None:
                del model.of.scale
            elif scale != 1.0:
                model.of.scale = scale
            expected = nn.functional.linear(X, *weights) * (scale or 1.0)
            wanted = expected.square().mean() if trains else expected
            torch.testing.assert_close(planned(X).detach(), wanted)
