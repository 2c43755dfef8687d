"""Losses that ask objects of torch's, which no model holds, get the answer of their parts of today."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.distributions import transforms

from gascompile import compile_step

STEPS = 4
Loss = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


def likely(model: nn.Module, batch: torch.Tensor, held: Any) -> torch.Tensor:
    value: torch.Tensor = -held.log_prob(model(batch)).mean()
    return value


def moved(model: nn.Module, batch: torch.Tensor, held: Any) -> torch.Tensor:
    value: torch.Tensor = held(model(batch)).square().mean()
    return value


def grown(model: nn.Module, batch: torch.Tensor, held: Any) -> torch.Tensor:
    value: torch.Tensor = model(batch).square().mean() * held.get_growth_factor()
    return value


def normal() -> Any:
    return distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)


def independent() -> Any:
    return distributions.Independent(normal(), 1, validate_args=False)


def mixture() -> Any:
    parts = distributions.Categorical(torch.ones(4), validate_args=False)
    return distributions.MixtureSameFamily(parts, normal(), validate_args=False)


def affine() -> Any:
    return transforms.AffineTransform(0.0, 1.0)


def composed() -> Any:
    return transforms.ComposeTransform([affine()])


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Loss]] = {
    "tensor": (normal, lambda d, i: setattr(d, "loc", torch.full((4,), float(i))), likely),
    "tensor in its place": (normal, lambda d, i: d.scale.fill_(1.0 + i), likely),
    "distribution inside": (
        independent,
        lambda d, i: setattr(d, "base_dist", normal().expand((4,)) if i < 2 else mixture_of(i)),
        likely,
    ),
    "tensor inside": (
        mixture,
        lambda d, i: setattr(d._component_distribution, "loc", torch.full((4,), float(i))),
        lambda model, batch, d: -d.log_prob(model(batch)[:, 0]).mean(),
    ),
    "number": (affine, lambda d, i: setattr(d, "scale", 1.0 + i), moved),
    "number inside": (composed, lambda d, i: setattr(d.parts[0], "loc", 1.0 + i), moved),
    "list": (composed, lambda d, i: d.parts.append(transforms.AffineTransform(1.0, 2.0)), moved),
    "growth": (
        lambda: torch.amp.GradScaler("cpu"),
        lambda d, i: d.set_growth_factor(2.0 + i),
        grown,
    ),
}


def mixture_of(number: int) -> Any:
    return distributions.Laplace(
        torch.zeros(4), torch.full((4,), 1.0 + number), validate_args=False
    )


@pytest.mark.parametrize("case", CASES)
def test_parts_are_todays(case: str, tmp_path: Path) -> None:
    make, change, loss_fn = CASES[case]
    found: dict[bool, list[float]] = {}
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, held = nn.Linear(4, 4), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(3, 4) for _ in range(STEPS)]
        losses = found.setdefault(is_planned, [])
        if not is_planned:
            for number, batch in enumerate(batches):
                change(held, number)
                loss = loss_fn(model, batch, held)
                losses.append(float(loss.detach()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            continue
        loss_of = Held(held, loss_fn)
        with compile_step(model, loss_of, optimizer, cache_dir=tmp_path) as step:
            for number, batch in enumerate(batches):
                change(held, number)
                losses.append(float(step(batch)))
    assert found[True] == found[False]


class Held:
    """A loss with what it asks."""

    def __init__(self, held: Any, loss_fn: Loss) -> None:
        self.held, self.loss_fn = held, loss_fn

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(model, batch, self.held)
