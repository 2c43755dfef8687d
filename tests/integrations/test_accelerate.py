"""Training loops over what accelerate's ``prepare`` returns, against the same loops in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gascompile import compile_step
from gascompile.core.errors import UnsupportedOpError
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate keeps what it was told in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).train()


def _loader() -> Any:
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(28, 16, generator=made), torch.randn(28, 16, generator=made))
    return DataLoader(data, batch_size=4)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    # What accelerate's ``backward`` divides by.
    return nn.functional.mse_loss(model(batch[0]), batch[1]) / 2


def _prepared(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any, Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found: tuple[Any, Any, Any, Any] = accelerator.prepare(model, optimizer, _loader(), scheduler)
    return found


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_loops_with_accelerate(precision: str, tmp_path: Path) -> None:
    """Accumulation that ends with the data, a scheduler, and a checkpoint while the step is open."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    theirs, optimizer, loader, scheduler = _prepared(accelerator, _model())
    wanted = []
    for batch in loader:
        with accelerator.accumulate(theirs):
            loss = nn.functional.mse_loss(theirs(batch[0]), batch[1])
            accelerator.backward(loss)
            wanted.append(loss.detach() / 2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    model, optimizer, loader, scheduler = _prepared(accelerator, _model())
    assert isinstance(optimizer, AcceleratedOptimizer)
    found = []
    first = next(iter(loader))
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path, "accumulate": 2}
    with compile_step(
        model, _loss, optimizer, "6MiB", first, time_limit_s=PLANNING_S, **options
    ) as step:
        for batch in loader:
            with accelerator.accumulate(model):
                found.append(step(batch, updates=accelerator.sync_gradients))
                scheduler.step()
        accelerator.save_state(str(tmp_path / "state"))
    assert all(map(torch.equal, found, wanted))
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    kept = copy.deepcopy(optimizer.state_dict())
    accelerator.load_state(str(tmp_path / "state"))
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])


def test_scaled_losses_are_refused(tmp_path: Path) -> None:
    model, _ = _model(), Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(
        torch.optim.AdamW(model.parameters()), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(UnsupportedOpError, match=r"scales \(fp16\).*mixed_precision='bf16'"):
        compile_step(model, _loss, optimizer, "6MiB", cache_dir=tmp_path)
