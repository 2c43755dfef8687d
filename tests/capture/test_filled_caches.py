"""What a program computes once and keeps: after a capture it holds nothing of the trace, and eager runs as before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError
from tests.training.runs import MACHINE, PLANNING_S


@functools.lru_cache(maxsize=4)
def positions(count: int) -> torch.Tensor:
    return torch.arange(count).float()[:, None]


def _pair(count: int) -> dict[str, list[torch.Tensor]]:
    return {"both": [torch.arange(count).float()[:, None]]}


cached_pair = functools.cache(_pair)


class Held:
    @staticmethod
    @functools.lru_cache
    def positions(count: int) -> torch.Tensor:
        return positions.__wrapped__(count)

    @functools.lru_cache  # noqa: B019 - what programs have
    def of_self(self, count: int) -> torch.Tensor:
        return positions.__wrapped__(count)


HELD = Held()
TABLE: dict[int, torch.Tensor] = {}


def in_a_table(count: int) -> torch.Tensor:
    if count not in TABLE:
        TABLE[count] = positions.__wrapped__(count)
    return TABLE[count]


class Adding(nn.Module):
    """Adds what a function returns for the number of rows."""

    def __init__(self, find: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.find = nn.Linear(8, 8), find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.find(x.shape[0])
        return out


class Keeping(Adding):
    """Has a cache of its own, of its own method."""

    def __init__(self, find: Callable[[int], torch.Tensor]) -> None:
        super().__init__(find)
        self.find = functools.lru_cache(self.rows)

    def rows(self, count: int) -> torch.Tensor:
        return positions.__wrapped__(count)


MODELS: dict[str, tuple[Callable[[Any], Adding], Callable[[int], torch.Tensor]]] = {
    "function": (Adding, positions),
    "another name": (Adding, lambda count: cached_pair(count)["both"][0]),
    "static method": (Adding, Held.positions),
    "method": (Adding, HELD.of_self),
    "module": (Keeping, positions),
}


@pytest.fixture(autouse=True)
def _anew() -> None:
    for cache in (positions, cached_pair, Held.positions, Held.of_self, TABLE):
        getattr(cache, "cache_clear", TABLE.clear)()


@pytest.mark.parametrize("name", MODELS)
def test_a_capture_leaves_no_tensors_of_its_own_in_caches(name: str, tmp_path: Path) -> None:
    make, find = MODELS[name]
    model, x = make(find).eval(), torch.randn(6, 8)
    with gascompile.compile(model, "1MiB", machine=MACHINE, cache_dir=tmp_path) as compiled:
        found = compiled(x)
    assert type(model.find(6)) is torch.Tensor
    other = make(find)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(found, model(x))
        torch.testing.assert_close(other(x), model(x))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("name", [*MODELS, "table"])
def test_a_step_that_is_refused_leaves_eager_as_it_was(name: str, tmp_path: Path) -> None:
    make, find = MODELS.get(name, (Adding, in_a_table))
    model, x = make(find).train(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    how: dict[str, Any] = {
        "machine": MACHINE, "cache_dir": tmp_path, "time_limit_s": PLANNING_S
    }  # fmt: skip
    with pytest.raises(CaptureError, match=r"keeps a tensor that it computes.*call loss_fn\(model"):
        gascompile.compile_step(model, _loss, optimizer, "64MiB", x, **how)
    assert not TABLE
    wanted = _loss(model, x)
    # As the message says.
    with gascompile.compile_step(model, _loss, optimizer, "64MiB", x, **how) as step:
        torch.testing.assert_close(step(x), wanted.detach())
    torch.testing.assert_close(_loss(model, x), wanted)
