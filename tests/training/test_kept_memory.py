"""Tensors that get other memory while a model's code is followed: refused by name, never left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Write = Callable[["Writing", torch.Tensor], None]


class Writing(nn.Module):
    """Writes what it is told to in its forward pass."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: torch.Tensor
        self.plain = torch.zeros(8)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x.mean(0).detach())
        y: torch.Tensor = self.layer(x) + self.mean + self.plain
        return y


def of_buffer(model: Writing, value: torch.Tensor) -> None:
    model.mean.data = 0.9 * model.mean.data + value


def of_parameter(model: Writing, value: torch.Tensor) -> None:
    model.layer.bias.data = model.layer.bias.data + value


def of_plain(model: Writing, value: torch.Tensor) -> None:
    model.plain.data = value


def by_name(model: Writing, value: torch.Tensor) -> None:
    setattr(model.mean, "data", 0.9 * model.mean + value)  # noqa: B010


def of_itself(model: Writing, value: torch.Tensor) -> None:
    model.mean.__setattr__("data", model.mean + value)


def of_local(model: Writing, value: torch.Tensor) -> None:
    local = torch.zeros(8)
    local.data = value
    model.mean.copy_(local)


def by_swap(model: Writing, value: torch.Tensor) -> None:
    torch.utils.swap_tensors(model.mean, value)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (of_buffer, "data of 'mean'"),
        (of_parameter, "data of 'layer.bias'"),
        (of_plain, "data of 'plain'"),
        (by_name, "data of 'mean'"),
        (of_itself, "data of 'mean'"),
        (of_local, r"data of a tensor of \[8\]"),
        (by_swap, "swaps 'mean'"),
    ],
)
def test_other_memory_is_refused(write: Write, named: str, tmp_path: Path) -> None:
    model = Writing(write)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap = torch._C._swap_tensor_impl
    with pytest.raises(CaptureError, match=rf"{named}.*copy_\(value\)"):
        gascompile.compile_step(
            model, squared, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        )
    assert torch._C._swap_tensor_impl is swap
    if write is not by_swap:  # torch.export's own reasons come first
        with torch.no_grad(), pytest.raises(CaptureError, match=rf"{named}.*copy_\(value\)"):
            gascompile.compile(Writing(write).eval(), "64MiB", (BATCH,), cache_dir=tmp_path)


def test_a_loss_is_refused_too(tmp_path: Path) -> None:
    weight = torch.ones(8)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        weight.data = weight * 0.5
        value: torch.Tensor = (model(batch) * weight).pow(2).mean()
        return value

    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match=r"data of a tensor of \[8\]"):
        gascompile.compile_step(
            model, loss, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        )


def in_place(model: Writing, value: torch.Tensor) -> None:
    model.mean.data.mul_(0.9).add_(value)


def to_where_it_is(model: Writing, value: torch.Tensor) -> None:
    model.mean.data = model.mean.data.to(value.dtype)
    model.mean.add_(value)


@pytest.mark.parametrize("write", [in_place, to_where_it_is])
def test_what_writes_in_place_trains_as_eager_does(write: Write, tmp_path: Path) -> None:
    ours, eager = Writing(write), Writing(write)
    theirs = torch.optim.SGD(eager.parameters(), 0.1)
    with gascompile.compile_step(
        ours,
        squared,
        torch.optim.SGD(ours.parameters(), 0.1),
        "64MiB",
        BATCH,
        machine=MACHINE,
        cache_dir=tmp_path,
    ) as step:
        for _ in range(3):
            theirs.zero_grad()
            value = squared(eager, BATCH)
            value.backward()
            theirs.step()
            assert torch.equal(step(BATCH), value)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
