"""What the loss gets of a batch: the values that were given, and one tensor where one was given twice."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.training.pipeline.provable import split_rows
from gascompile.training.planning.row_draws import with_more_rows
from tests.training.runs import MACHINE


class Task(enum.Enum):
    """What a row is for."""

    FIRST = "a"
    SECOND = "b"


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


class Net(nn.Module):
    """Reads what kind of thing it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        if isinstance(other, torch.Tensor):
            factor = 2 if other is x else 3
        else:
            factor = 2 if other is Task.FIRST or other is Level.LOW else 3
        made: torch.Tensor = self.linear(x) * factor
        return made


def _loss(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    value: torch.Tensor = model(*batch).square().mean()
    return value * (5 if len({id(leaf) for leaf in batch}) == 1 else 1)


Steps = tuple[Any, Callable[[Any], float], nn.Module]


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    """A planned step beside eager's, of the same weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    planned, eager = models
    mine = torch.optim.SGD(eager.parameters(), lr=0.1)

    def by_hand(batch: Any) -> float:
        loss = _loss(eager, batch)
        mine.zero_grad()
        loss.backward()
        mine.step()
        return loss.item()

    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    step = gascompile.compile_step(
        planned,
        _loss,
        optimizer,
        "64MiB",
        machine=MACHINE,
        cache_dir=tmp_path,
        fuse="off",
        time_limit_s=0.2,
    )
    with step:
        yield step, by_hand, eager


def _x(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("values", [(Task.FIRST, Task.SECOND), (Level.LOW, 1), (1j, b"a")])
def test_values_are_those_that_were_given(steps: Steps, values: tuple[Any, Any]) -> None:
    step, by_hand, eager = steps
    for i in range(4):
        batch = (_x(i), values[i % 2])
        assert float(step(batch)) == pytest.approx(by_hand(batch), rel=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(step.model(_x(9), values[0]), eager(_x(9), values[0]))


@pytest.mark.parametrize("is_same_first", [True, False])
def test_a_tensor_that_is_given_twice_is_one(steps: Steps, is_same_first: bool) -> None:
    step, by_hand, eager = steps
    for i in range(4):
        batch = (_x(i), _x(i))
        if (i % 2 == 0) == is_same_first:
            batch = (batch[0], batch[0])
        assert float(step(batch)) == pytest.approx(by_hand(batch), rel=1e-6)
    x = _x(9)
    with torch.no_grad():
        for other in (x, x.clone(), x):
            torch.testing.assert_close(step.model(x, other), eager(x, other))


def test_more_rows_and_fewer_have_one_tensor_where_the_batch_has() -> None:
    x, other = _x(0), _x(0)
    for batch in (
        with_more_rows({"x": x, "y": other, "z": x}),
        split_rows({"x": x, "y": other, "z": x}, 2)[0],
    ):
        assert batch["x"] is batch["z"]
        assert batch["x"] is not batch["y"]
        assert torch.equal(batch["x"], batch["y"])
        assert len(batch["x"]) != len(x)
