"""Two open steps in one loop: a generator that is trained through a critic with a step of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import OpenStepError
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE


def _nets() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    first, second = (
        torch.optim.Adam(net.parameters(), lr=1e-2, fused=True) for net in (generator, critic)
    )
    return generator, critic, first, second


def _judged(critic: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (
        functional.softplus(-critic(pair[0])).mean() + functional.softplus(critic(pair[1])).mean()
    )


def test_a_generator_and_its_critic(tmp_path: Path) -> None:
    """Each step of the generator reads the critic as it is by then, from where its own step has it."""
    noise, real = torch.randn(5, 4, 8), torch.randn(5, 4, 16)
    options: dict[str, Any] = {
        "machine": MACHINE,
        "cache_dir": tmp_path,
        "time_limit_s": PLANNING_S,
    }
    generator, critic, of_generator, of_critic = _nets()
    wanted = []
    for z, x in zip(noise, real, strict=True):
        of_critic.zero_grad()
        judged = _judged(critic, (x, generator(z).detach()))
        judged.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = functional.softplus(-critic(generator(z))).mean()
        fooled.backward()
        of_generator.step()
        wanted += [judged.detach(), fooled.detach()]
    theirs = [p.detach() for p in (*generator.parameters(), *critic.parameters())]
    generator, critic, of_generator, of_critic = _nets()

    def fools(model: nn.Module, z: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-critic(model(z))).mean()

    found = []
    with (
        compile_step(generator, fools, of_generator, "6MiB", noise[0], **options) as step,
        compile_step(
            critic, _judged, of_critic, "6MiB", (real[0], torch.zeros(4, 16)), **options
        ) as judge,
    ):
        for z, x in zip(noise, real, strict=True):
            with torch.no_grad():
                fake = generator(z)
            found += [judge((x, fake)), step(z)]
    assert all(map(torch.equal, found, wanted))
    ours = (*generator.parameters(), *critic.parameters())
    assert all(map(torch.equal, ours, theirs))


def test_a_critic_whose_step_is_open_first_is_refused(tmp_path: Path) -> None:
    """Its tensors are the other step's by then, and have no memory that a capture could look at."""
    generator, critic, of_generator, of_critic = _nets()
    options: dict[str, Any] = {
        "machine": MACHINE,
        "cache_dir": tmp_path,
        "time_limit_s": PLANNING_S,
    }
    pair = (torch.randn(4, 16), torch.randn(4, 16))
    with (
        compile_step(critic, _judged, of_critic, "6MiB", pair, **options),
        pytest.raises(OpenStepError, match="its values are with an open training step"),
    ):
        compile_step(
            generator,
            lambda model, z: critic(model(z)).mean(),
            of_generator,
            "6MiB",
            torch.randn(4, 8),
            **options,
        )
