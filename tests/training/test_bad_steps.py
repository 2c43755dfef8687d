"""What cannot be trained, and what goes wrong on the way: typed errors that say what to do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import CaptureError, NanLossError, UnsupportedOpError
from gascompile.training.step import TrainingStep
from tests.training.trials import MACHINE, Trial, adamw


class Net(nn.Module):
    """Two layers with normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.log(self.norm(self.first(x)).square() + 1e-3))
        return found


def _mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def _compile(
    tmp_path: Path, model: nn.Module, loss_fn: Any = _mean, optimizer: Any = adamw, **options: Any
) -> TrainingStep:
    options = {"example_batch": torch.randn(4, 16), **options}
    made = optimizer(model)
    return compile_step(model, loss_fn, made, None, machine=MACHINE, cache_dir=tmp_path, **options)


def _branch(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    loss: torch.Tensor = out.mean() if out.sum() > 0 else out.square().mean()
    return loss


def _clamp(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.first.weight.clamp_(-1, 1)
    return _mean(model, batch)


def _without_gradient(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _mean(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: m(b), r"returned \(4, 4\).*mean"),
        (lambda m, b: 3.0, "returned float"),
        (lambda m, b: m(b).argmax(), "floating-point scalar"),
        (_without_gradient, "no_grad"),
        (lambda m, b: _mean(m, b).detach(), "detach"),
        (lambda m, b: _mean(m, b).item(), r"test_bad_steps\.py:\d+.*\.item\(\)"),
        (_branch, r"test_bad_steps\.py:\d+.*torch\.where"),
        (lambda m, b: m(b)[m(b) > 0].mean(), r"test_bad_steps\.py:\d+.*mask"),
        (lambda m, b: _mean(m, b["x"]), r"test_bad_steps\.py:\d+"),
        (_clamp, r"'first\.weight' in its forward pass"),
        (lambda m, b: _mean(m, b.mul_(2)), "batch in place"),
    ],
)
def test_losses_that_cannot_be_captured(loss_fn: Any, message: str, tmp_path: Path) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=message):
        _compile(tmp_path, model, loss_fn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_models_that_cannot_be_trained(tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(CaptureError, match=r"'first.weight' is on the meta device.*to_empty"):
        _compile(tmp_path, empty)
    with pytest.raises(UnsupportedOpError, match=r"'first.weight' is torch.bfloat16.*autocast"):
        _compile(tmp_path, Net().bfloat16(), lambda m, b: _mean(m, b.bfloat16()))
    overlapping, memory = Net(), torch.randn(64 + 16 * 16 - 8)
    overlapping.first.weight.data = memory[: 16 * 16].view(16, 16)
    overlapping.last.weight.data = memory[-64:].view(4, 16)
    with pytest.raises(CaptureError, match=r"'last.weight'.*overlap in memory.*none of them holds"):
        _compile(tmp_path, overlapping)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.Rprop(m.parameters()), r"Rprop; use .*AdamW.*Adam.*SGD.*RMSprop"),
        (lambda m: torch.optim.SGD(m.parameters(), differentiable=True), "differentiable"),
        (lambda m: type("Mine", (torch.optim.AdamW,), {})(m.parameters()), "Mine"),
    ],
)
def test_optimizers_without_a_rule(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match=message):
        _compile(tmp_path, Net(), optimizer=make)


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    with pytest.raises(CaptureError, match="sparse=False"):
        _compile(tmp_path, model, optimizer=_sgd, example_batch=torch.tensor([1, 2]))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    other = Net()
    with pytest.raises(ValueError, match="none of the model's"):
        _compile(tmp_path, Net(), optimizer=lambda _: adamw(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 1.5}, "accumulate=1.5"),
        ({"accumulate": "2"}, "accumulate='2'"),
        ({"accumulate": True}, "accumulate=True"),
        ({"accumulate": float("inf")}, "accumulate=inf"),
        ({"max_grad_norm": True}, "max_grad_norm=True"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1'"),
        ({"rows": "even"}, "rows='even'"),
        ({"time_limit_s": "5"}, "time_limit_s must be positive, not '5'"),
        ({"mip_gap": "small"}, "mip_gap is a fraction"),
        ({"fuse_runs": None}, "fuse_runs is a number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"on_nan": "stop"}, "raise, locate, ignore"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _compile(tmp_path, Net(), **options)


def test_numbers_of_numpy(tmp_path: Path) -> None:
    options = {
        "accumulate": np.int64(2),
        "max_grad_norm": np.float32(1),
        "mip_gap": np.float32(0.02),
    }
    model = Net()
    with _compile(tmp_path, model, **options) as step:
        first, second = step(torch.ones(4, 16)), step(torch.ones(4, 16))
        assert torch.equal(first, second)  # which ends with the update
        assert not torch.equal(step(torch.ones(4, 16)), first)


def test_the_first_batch_is_planned_for_without_an_example(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    batch = torch.randn(4, 16)
    with _compile(tmp_path, model, example_batch=None) as step:
        assert step.plan is None
        loss = step(batch)
    assert torch.equal(loss, _mean(twin, batch).detach())


def test_nan_is_refused_before_anything_changes(tmp_path: Path) -> None:
    batches = [torch.randn(4, 16) for _ in range(4)]
    bad = batches[0].clone()
    bad[1, 2] = float("nan")
    trial = Trial(Net(), _mean, batches, tmp_path)
    eager = trial.eager()
    for budget in (None, trial.smallest_budget()):
        model = copy.deepcopy(trial.model)
        with trial.compiled(model, adamw(model), budget) as step:
            losses = [step(batch) for batch in batches[:2]]
            with pytest.raises(NanLossError, match=r"loss of step 3 is NaN.*locate") as caught:
                step(bad)
            assert step.num_steps == 2
            losses += [step(batch) for batch in batches[2:]]
        assert losses == eager.losses
        assert all(torch.equal(v, eager.state[name]) for name, v in model.state_dict().items())
    assert caught.value.step == 3
    assert pickle.loads(pickle.dumps(caught.value)).step == 3


def test_nan_is_ignored_as_eager_does(tmp_path: Path) -> None:
    with _compile(tmp_path, Net(), on_nan="ignore") as step:
        assert step(torch.full((4, 16), float("nan"))).isnan()
        assert step.num_steps == 1


def test_the_op_that_makes_the_first_nan_is_named(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.log(functional.relu(model(batch)) - batch.mean()).mean()

    with (
        _compile(tmp_path, Net(), loss_fn, on_nan="locate") as step,
        pytest.raises(NanLossError, match=r"'aten.log.default' of step 1 made the first NaN"),
    ):
        step(torch.full((4, 16), 50.0))


def test_nan_of_the_backward_pass_is_named(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # The square root of zero has an infinite slope, which is multiplied by zero.
        return torch.sqrt(model(batch) * 0).sum()

    with (
        _compile(tmp_path, Net(), loss_fn, on_nan="locate") as step,
        pytest.raises(NanLossError, match="made the first NaN") as caught,
    ):
        step(torch.randn(4, 16))
    assert caught.value.op.startswith("aten.")
