"""Training steps on a GPU that is there: eager's losses and states within budgets, wherever values and updates are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile import TrainingStep, compile_step
from gascompile.core.budget import Budget
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.steps import Offload, Reload
from gascompile.passes.verify.walk import verify
from tests.training.runs import TinyGPT, adamw, batches, loss_fn

pytestmark = pytest.mark.gpu

_MIB = 1 << 20


def new_model() -> TinyGPT:
    """Return a model without dropout, whose random numbers would be others on a GPU."""
    torch.manual_seed(1)
    return TinyGPT(dropout=0.0, blocks=3).train()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that keeps what this machine was measured to do."""
    return tmp_path_factory.mktemp("gpu")


def eager_losses(count: int, **options: Any) -> tuple[list[float], nn.Module]:
    """Return the losses of plain torch on the same GPU, and the model that it ends with."""
    model = new_model().cuda()
    optimizer = adamw(model)
    losses = []
    for batch in batches(count):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch.cuda())
        loss.backward()
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def begun(
    cache: Path, budget: Budget | None, model: nn.Module | None = None, **options: Any
) -> TrainingStep:
    model = new_model() if model is None else model
    return compile_step(
        model,
        loss_fn=loss_fn,
        optimizer=adamw(model),
        example_batch=batches(1)[0],
        budget=budget,
        cache_dir=cache,
        time_limit_s=2.0,
        **options,
    )


def least_bytes(cache: Path, **options: Any) -> int:
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        begun(cache, Budget(gpu=0), **options)
    return error.value.required_bytes


def require_near(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.parametrize("more", [0, 1 * _MIB, None], ids=["least", "some", "all"])
def test_losses_are_eagers_within_the_budget(graphs: str, more: int | None, cache: Path) -> None:
    wanted, reference = eager_losses(6)
    budget = None if more is None else Budget(gpu=least_bytes(cache) + more)
    model = new_model()
    with begun(cache, budget, model, graphs=graphs) as step:
        assert step.plan is not None
        assert step.plan.machine.compute_backend == "cuda"
        verify(step.plan)
        require_near([float(step(batch)) for batch in batches(6)], wanted)
        report = step.last_run
        assert report is not None
        assert report.peak_bytes["gpu"] <= step.plan.budget_bytes["gpu"]
        assert report.peak_bytes["cpu"] <= step.plan.budget_bytes["cpu"]
        if more == 0:
            assert any(isinstance(s, (Offload, Reload)) for s in step.plan.steps)
    for name, value in reference.state_dict().items():
        # Adam takes a step of a whole learning rate where a gradient is nothing but rounding.
        found = model.state_dict()[name].cpu()
        torch.testing.assert_close(found, value.cpu(), rtol=1e-2, atol=6 * 3e-3)


@pytest.mark.parametrize("more", [0, None], ids=["least", "all"])
@pytest.mark.parametrize(
    "options",
    [{"sites": "all"}, {"states": "8bit"}, {"max_grad_norm": 0.05}, {"accumulate": 2}],
    ids=["both processors", "8bit", "clipped", "accumulated"],
)
def test_options_train_as_eager_does(
    options: dict[str, Any], more: int | None, cache: Path
) -> None:
    budget = None if more is None else Budget(gpu=least_bytes(cache, **options) + more)
    with begun(cache, budget, **options) as step:
        found = [float(step(batch)) for batch in batches(6)]
        assert step.plan is not None
        report = step.last_run
        assert report is not None
        assert report.peak_bytes["gpu"] <= step.plan.budget_bytes["gpu"]
    if "accumulate" in options or "states" in options:
        # The same step on the processor, whose results tests compare with eager's.
        with begun(cache, None, machine="cpu-nvme", **options) as here:
            wanted = [float(here(batch)) for batch in batches(6)]
    else:
        wanted, _ = eager_losses(6, **options)
    require_near(found, wanted)


def test_a_run_goes_on_from_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    wanted, _ = eager_losses(5)
    budget = Budget(gpu=least_bytes(cache) + _MIB // 2)
    with begun(cache, budget) as step:
        require_near([float(step(batch)) for batch in batches(5)[:3]], wanted[:3])
        step.save(tmp_path / "run")
    with begun(cache, budget) as other:
        other.load(tmp_path / "run")
        require_near([float(other(batch)) for batch in batches(5)[3:]], wanted[3:])
        before = float(other.eval(batches(1)[0]))
        assert float(other.eval(batches(1)[0])) == before


def test_dropout_is_refused(cache: Path) -> None:
    torch.manual_seed(1)
    model = TinyGPT(dropout=0.3).train()
    with pytest.raises(UnsupportedOpError, match="kept in no checkpoint"):
        begun(cache, None, model)
