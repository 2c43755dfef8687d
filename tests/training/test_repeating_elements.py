"""Parameters of which several elements lie in one place: eager cannot update them, and a step does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import UnsupportedOpError
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["expanded", "overlapping"])
def test_elements_in_one_place_are_not_trained(way: str, tmp_path: Path) -> None:
    def made() -> nn.Linear:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        whole = torch.randn(1, 8) if way == "expanded" else torch.randn(15)
        apart = whole.expand(8, 8) if way == "expanded" else whole.as_strided((8, 8), (1, 1))
        layer.weight = nn.Parameter(apart)
        return layer

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(batch).pow(2).mean()
        return value

    def step_of(model: nn.Module) -> gascompile.TrainingStep:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=False)
        return gascompile.compile_step(
            model, loss, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        )

    model = made()
    if way == "expanded":
        eager = torch.optim.AdamW(model.parameters(), foreach=False)
        loss(model, BATCH).backward()
        with pytest.raises(RuntimeError, match="more than one element"):
            eager.step()
        eager.zero_grad()
    strides = model.weight.stride()
    with pytest.raises(UnsupportedOpError, match=r"'weight' is trained.*expand\(\)"):
        step_of(model)
    assert model.weight.stride() == strides
    frozen = made().requires_grad_(False)
    frozen.bias.requires_grad_()
    expected = loss(frozen, BATCH).detach()
    with step_of(frozen) as step:
        assert torch.equal(step(BATCH), expected)
