"""What a loss computes and does not read: values that buffers keep, and draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError


class Keeping(nn.Module):
    """Writes what it computes to a buffer."""

    mean: torch.Tensor
    cache: torch.Tensor
    again: torch.Tensor

    def __init__(self, write: Callable[[Keeping, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write = nn.Linear(4, 4), write
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(2, 3, 4))
        self.register_buffer("again", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.write(self, y)
        return y


def _without(model: Keeping, y: torch.Tensor) -> None:
    with torch.no_grad():
        model.mean.lerp_(y.mean((0, 1)), 0.5)


WRITES: dict[str, Callable[[Keeping, torch.Tensor], object]] = {
    "mul_ and add_": lambda m, y: m.mean.mul_(0.9).add_(0.1 * y.mean((0, 1))),
    "lerp_": lambda m, y: m.mean.lerp_(y.mean((0, 1)), 0.5),
    "copy_": lambda m, y: m.cache.copy_(y),
    "a slice": lambda m, y: m.cache[:1, 1:].copy_(y[:1, 1:]),
    "index_put_": lambda m, y: m.cache.index_put_((torch.tensor([1]),), y[:1] * y[1:]),
    "the other name": lambda m, y: m.again.add_(y.sum((0, 1))),
    "two": lambda m, y: (m.cache.add_(y), m.mean.add_(y[0, 0])),
    "detached": lambda m, y: m.mean.copy_(y.detach()[0, 0]),
    "without gradients": _without,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_buffers_keep_changes_no_gradient(
    write: Callable[[Keeping, torch.Tensor], object], accumulate: int, tmp_path: Path
) -> None:
    model, eager = Keeping(write), Keeping(write)
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager))
    batches = torch.randn(4, 2, 3, 4)

    def loss_fn(of: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = of(x).square().mean()
        return loss

    with gascompile.compile_step(
        model,
        loss_fn,
        optimizer,
        "8MiB",
        batches[0],
        accumulate=accumulate,
        cache_dir=tmp_path,
        time_limit_s=0.5,
    ) as step:
        for number, batch in enumerate(batches):
            loss = loss_fn(eager, batch)
            loss.backward()
            if number % accumulate == accumulate - 1:
                own.step()
                own.zero_grad()
            assert float(step(batch)) == pytest.approx(loss.item(), abs=1e-6)
    for name, tensor in eager.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-6), name


class Reading(Keeping):
    """Reads the mean that it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y - self.mean


def test_a_loss_that_reads_what_a_step_before_wrote_with_gradients_is_refused(
    tmp_path: Path,
) -> None:
    model = Reading(WRITES["lerp_"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match="the loss reads 'mean', a buffer"):
        gascompile.compile_step(
            model,
            lambda of, x: of(x).square().mean(),
            optimizer,
            "8MiB",
            torch.randn(2, 3, 4),
            cache_dir=tmp_path,
        )


class Drawing(nn.Module):
    """Draws what no loss reads, and drops out after it."""

    def __init__(self, draw: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.aside, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, object]:
        beside = self.draw(self.aside(x))
        return nn.functional.dropout(self.layer(x), 0.5), beside


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "dropout": lambda y: nn.functional.dropout(y, 0.5),
    "alpha_dropout": lambda y: nn.functional.alpha_dropout(y, 0.5, training=True),
    "rand": lambda y: torch.rand(3),
    "randperm": lambda y: torch.randperm(5),
    "rrelu": lambda y: nn.functional.rrelu(y, training=True),
    "bernoulli_": lambda y: torch.empty_like(y).bernoulli_(0.3),
    "normal_": lambda y: y.detach().clone().normal_(),
    "multinomial": lambda y: torch.multinomial(y.detach().flatten(1).softmax(-1), 2),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_that_nobody_reads_are_drawn(
    draw: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    def loss_fn(of: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = of(x)[0].square().mean()
        return loss

    model, eager = Drawing(draw), Drawing(draw)
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager))
    x, expected, found = torch.randn(3, 5, 4), [], []
    torch.manual_seed(7)
    for _ in range(3):
        own.zero_grad()
        loss = loss_fn(eager, x)
        loss.backward()
        own.step()
        with torch.no_grad():
            expected += [loss.item(), loss_fn(eager, x).item(), torch.rand(1).item()]
    with gascompile.compile_step(
        model, loss_fn, optimizer, "8MiB", x, cache_dir=tmp_path, time_limit_s=0.5
    ) as step:
        torch.manual_seed(7)
        for _ in range(3):
            found += [step(x).item(), step.eval(x).item(), torch.rand(1).item()]
    assert found == pytest.approx(expected, abs=1e-6)
