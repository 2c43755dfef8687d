"""Pruning and the old norms of weights: steps are refused with what to use in their place; inference takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import gascompile
from gascompile.core.errors import CaptureError
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def pruned(layer: nn.Linear) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        (pruned, r"prune\.remove"),
        (nn.utils.weight_norm, r"parametrizations\.weight_norm"),
        (nn.utils.spectral_norm, r"parametrizations\.spectral_norm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_old_hooks_are_named(
    change: Callable[[nn.Linear], nn.Module], instead: str, tmp_path: Path
) -> None:
    model = nn.Sequential(change(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match=rf"'0' has a hook of .*{instead}"):
        gascompile.compile_step(
            model, squared, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        )
    torch.manual_seed(0)
    inference = nn.Sequential(change(nn.Linear(8, 8))).eval()
    torch.manual_seed(0)
    eager = nn.Sequential(change(nn.Linear(8, 8))).eval()
    with (
        torch.no_grad(),
        gascompile.compile(inference, "64MiB", machine=MACHINE, cache_dir=tmp_path) as compiled,
    ):
        for _ in range(2):
            assert torch.equal(compiled(BATCH), eager(BATCH))
            for of in (inference, eager):
                # What the weight is made of changes, and the weight with it.
                next(p for n, p in of.named_parameters() if "weight" in n).mul_(2)


def test_what_they_advise_trains(tmp_path: Path) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    prune.l1_unstructured(first, "weight", 0.3)
    prune.remove(first, "weight")
    model = nn.Sequential(first, parametrizations.weight_norm(second))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = squared(model, BATCH).detach()
    with gascompile.compile_step(
        model, squared, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        assert torch.equal(step(BATCH), expected)
