"""Whatever a loop does between its steps, it gets eager's bits, or an error that says what to do instead.

A run takes a sample of the cases and fewer steps; ``GASCOMPILE_LOOPS=all`` takes all of them, 20 steps each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.errors import GASCompileError
from tests.training.loops import Case, Loop, eager, planned

ALL = os.environ.get("GASCOMPILE_LOOPS") == "all"
UNPLANNED = {"unplanned_optimizer": True}


class Branches(nn.Module):
    """A trunk and two heads, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, heads: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        hidden = self.trunk(x)
        total: torch.Tensor = sum((self.heads[i](hidden) for i in heads), torch.zeros(4))
        return total * self.scale


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def of_heads(model: nn.Module, batch: tuple[torch.Tensor, tuple[int, ...]]) -> torch.Tensor:
    value: torch.Tensor = model(*batch).pow(2).mean()
    return value


def in_turn(number: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    return batch(number), ((0, 1), (0,), (1,))[number % 3]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)


def freezing(first: int, last: int) -> Callable[[Loop, int], None]:
    """Return a change that freezes a head from one step to another."""

    def change(loop: Loop, number: int) -> None:
        for parameter in loop.model.get_submodule("heads.1").parameters():
            parameter.requires_grad_(not first <= number < last)

    return change


def grouped(**changes: Callable[[int], Any]) -> Callable[[Loop, int], None]:
    """Return a change of options in the optimizer's groups."""

    def change(loop: Loop, number: int) -> None:
        for group in loop.optimizer.param_groups:
            group.update({key: value(number) for key, value in changes.items()})

    return change


def case(name: str, **options: Any) -> Case:
    fields: dict[str, Any] = {
        "model": Branches,
        "loss_fn": square,
        "batches": batch,
        "optimizer": adamw,
    }
    return Case(name, **{**fields, **options})


CASES = [
    case("frozen during the run, AdamW", change=freezing(3, 9)),
    case("frozen during the run, momentum", change=freezing(3, 9), optimizer=sgd),
    case(
        "frozen during the run, RMSprop",
        change=freezing(3, 9),
        optimizer=rmsprop,
        options=UNPLANNED,
    ),
    case("unfrozen later, AdamW", change=freezing(0, 5)),
    case("unfrozen later, Adam", change=freezing(0, 5), optimizer=adam),
    case("unfrozen later, momentum", change=freezing(0, 5), optimizer=sgd),
    case("unfrozen later, RMSprop", change=freezing(0, 5), optimizer=rmsprop, options=UNPLANNED),
    case("partial batches, AdamW", loss_fn=of_heads, batches=in_turn),
    case("partial batches, momentum", loss_fn=of_heads, batches=in_turn, optimizer=sgd),
    case(
        "partial batches, RMSprop",
        loss_fn=of_heads,
        batches=in_turn,
        optimizer=rmsprop,
        options=UNPLANNED,
    ),
    case(
        "partial batches, summed and clipped",
        loss_fn=of_heads,
        batches=in_turn,
        options={"accumulate": 2, "max_grad_norm": 0.1},
    ),
    case(
        "partial batches, summed for RMSprop",
        loss_fn=of_heads,
        batches=in_turn,
        optimizer=rmsprop,
        options={"accumulate": 2, **UNPLANNED},
    ),
    case(
        "annealed betas, eps, decay and rate",
        change=grouped(
            betas=lambda n: (0.8 + n / 200, 0.9 + n / 250),
            eps=lambda n: 1e-8 * (n + 1),
            weight_decay=lambda n: n / 100,
            lr=lambda n: 0.01 / (n + 1),
        ),
    ),
    case(
        "annealed momentum and dampening",
        optimizer=sgd,
        change=grouped(momentum=lambda n: 0.5 + n / 50, dampening=lambda n: n / 100),
    ),
    case(
        "maximised every other step", optimizer=sgd, change=grouped(maximize=lambda n: n % 2 == 1)
    ),
]
SAMPLE = CASES if ALL else CASES[::4]


@pytest.mark.parametrize("case", SAMPLE, ids=[case.name for case in SAMPLE])
def test_a_loop_is_eager_or_refused(case: Case, tmp_path: Path) -> None:
    case = case if ALL else replace(case, num_steps=min(case.num_steps, 10))
    if case.refused:
        with pytest.raises(GASCompileError, match=case.refused):
            planned(case, tmp_path)
        return
    found, wanted = planned(case, tmp_path), eager(case)
    for number, (ours, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert torch.equal(ours, theirs), f"loss {number}: {ours} and {theirs}"
    assert found.values.keys() == wanted.values.keys()
    for name, value in wanted.values.items():
        assert torch.equal(found.values[name], value), name
