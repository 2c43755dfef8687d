"""Pruning and the old norms of weights: a weight that is computed anew before each call and kept as an attribute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gascompile


def pruned(layer: nn.Linear) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


CHANGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "pruned": pruned,
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def two(change: Callable[[nn.Linear], nn.Module], *, has_run: bool) -> list[nn.Module]:
    """Return a model twice; one that has run holds a weight of autograd's graph."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(change(nn.Linear(8, 8)), nn.ReLU()))
        if has_run:
            models[-1](torch.ones(4, 8))
    return list[nn.Module](models)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_old_hooks_train(
    change: Callable[[nn.Linear], nn.Module], has_run: bool, tmp_path: Path
) -> None:
    model, eager = two(change, has_run=has_run)
    optimizer, own = (torch.optim.SGD(of.parameters(), 0.1) for of in (model, eager))
    batches = torch.randn(4, 4, 8)
    with gascompile.compile_step(
        model, squared, optimizer, "8MiB", batches[0], cache_dir=tmp_path, time_limit_s=0.5
    ) as step:
        for batch in batches:
            own.zero_grad()
            loss = squared(eager, batch)
            loss.backward()
            own.step()
            assert float(step(batch)) == pytest.approx(loss.item(), abs=1e-6)
        expected = squared(eager.eval(), batches[0]).item()
        assert float(step.eval(batches[0])) == pytest.approx(expected, abs=1e-6)
    for name, tensor in eager.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_old_hooks_compute(
    change: Callable[[nn.Linear], nn.Module], has_run: bool, tmp_path: Path
) -> None:
    model, eager = (of.eval() for of in two(change, has_run=has_run))
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        for number in range(3):
            if number == 2:
                # What the weight is made of changes, and the weight with it.
                for of in (model, eager):
                    of.get_parameter("0.bias").add_(1)
                    next(p for n, p in of.named_parameters() if "weight" in n).mul_(2)
            x = torch.randn(4, 8)
            assert torch.equal(compiled(x), eager(x))
