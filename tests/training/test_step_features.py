"""What users do in training loops: each against eager, in full memory and in the smallest budget."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import PlanMismatchError
from gascompile.training.optimizers import optimizers
from tests.training.trials import MACHINE, TRANSFER_BYTES, Optimizers, Trial, adamw


class Net(nn.Module):
    """A tied, a repeated, a frozen, an unused and a scalar parameter; an embedding; dropout; in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.block = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = self.drop(torch.relu_(self.block(x))) + self.frozen(x) * self.scale
        x = self.norm(x.flatten(0, 1)).view_as(x)
        x += 1
        logits: torch.Tensor = self.head(x)
        return logits


def _loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(batch["ids"])
    losses = functional.cross_entropy(
        logits.flatten(0, 1), batch["pair"][0].flatten(), reduction="none"
    )
    loss: torch.Tensor = (losses * batch["mask"].flatten()).sum() / batch["count"]
    return loss


def _batches(number: int, rows: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "ids": torch.randint(0, 40, (rows, 8)),
            "pair": (torch.randint(0, 40, (rows, 8)), None),
            "mask": torch.rand(rows, 8) > 0.2,
            "count": 8.0,
            "note": "text",
        }
        for _ in range(number)
    ]


def _trial(tmp_path: Path, optimizer: Optimizers = adamw, **options: Any) -> Trial:
    return Trial(Net().train(), _loss, _batches(6), tmp_path, optimizer, options=options)


def _sgd(**options: Any) -> Optimizers:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.05, **options)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "lr": 3e-3, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def _part(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Net)
    return torch.optim.AdamW(model.block.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        _groups,
        _part,
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.1, fused=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, maximize=True, fused=True),
        _sgd(),
        _sgd(momentum=0.9, dampening=0.1, weight_decay=1e-2),
        _sgd(momentum=0.9, nesterov=True, weight_decay=1e-2, maximize=True),
    ],
    ids=["groups", "part", "adam", "maximize", "sgd", "momentum", "nesterov"],
)
def test_bits_of_every_optimizer(optimizer: Optimizers, tmp_path: Path) -> None:
    trial = _trial(tmp_path, optimizer)
    eager = trial.eager()
    trial.planned(trial.smallest_budget()).assert_equals(eager)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_default_kernels_are_close(kind: Any, tmp_path: Path) -> None:
    trial = _trial(tmp_path, lambda model: kind(model.parameters(), lr=1e-3))
    trial.planned().assert_close(trial.eager(), 1e-6)


def test_tiles_of_a_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_TILE_BYTES", 4096)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    for optimizer in (adamw, _sgd(momentum=0.9, weight_decay=0.1)):
        model = nn.Sequential(nn.Conv1d(3, 37, 33, padding=16), nn.Tanh(), nn.Linear(32, 77))
        trial = Trial(
            model, loss_fn, [torch.randn(4, 3, 32) for _ in range(4)], tmp_path, optimizer
        )
        eager = trial.eager()
        result = trial.planned(trial.smallest_budget())
        result.assert_equals(eager)
        assert result.plan is not None
        assert sum(name.startswith("0.weight:") for name in result.plan.tensors) >= 4


@pytest.mark.parametrize("optimizer", [adamw, _sgd(momentum=0.9)], ids=["adamw", "sgd"])
def test_clipping(optimizer: Optimizers, tmp_path: Path) -> None:
    trial = _trial(tmp_path, optimizer, max_grad_norm=0.3)
    eager = trial.eager()
    trial.planned(trial.smallest_budget()).assert_close(eager, 1e-6)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradients_of_three_batches(clip: float | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 3} | ({"max_grad_norm": clip} if clip else {})
    trial = _trial(tmp_path, **options)
    eager = trial.eager()
    for budget in (None, trial.smallest_budget()):
        result = trial.planned(budget)
        if clip:
            result.assert_close(eager, 1e-6)
        else:
            result.assert_equals(eager)
        if budget:
            assert result.peak_bytes <= budget - TRANSFER_BYTES


def test_accumulating_changes_no_parameter_before_the_last_batch(tmp_path: Path) -> None:
    model = Net().train()
    before = copy.deepcopy(model.state_dict())
    trial = Trial(model, _loss, _batches(2), tmp_path, options={"accumulate": 2})
    with trial.compiled(model, adamw(model), None) as step:
        step(trial.batches[0])
        halfway = step.state_dict()["model"]
        assert step.num_steps == 0
        step(trial.batches[1])
        assert step.num_steps == 1
    assert torch.equal(halfway["embed.weight"], before["embed.weight"])
    assert not torch.equal(model.state_dict()["embed.weight"], before["embed.weight"])


def test_schedulers_see_every_update(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    trial = Trial(Net().train(), _loss, _batches(6), tmp_path, adamw, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.planned().assert_equals(trial.eager())


def test_autocast_with_float32_masters(tmp_path: Path) -> None:
    """Without autocast's cache, which sums the gradients of a layer that is used again in bfloat16."""

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return _loss(model, batch)

    trial = Trial(Net().train(), loss_fn, _batches(6), tmp_path)
    eager = trial.eager()
    trial.planned(trial.smallest_budget()).assert_equals(eager)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: model(batch["ids"]).square().mean((0, 1))[3],
        lambda model, batch: model(batch["ids"]).square().mean().view(1).squeeze(),
        lambda model, batch: model.scale + 0 * batch["ids"].sum(),
        lambda model, batch: model.scale,
        lambda model, batch: (model.block.weight * model.frozen.weight).sum() + model.scale,
    ],
    ids=["element", "view", "scalar", "parameter", "gradient is a parameter"],
)
def test_losses_and_gradients_that_share_memory(
    loss_fn: Callable[[Any, Any], torch.Tensor], tmp_path: Path
) -> None:
    trial = Trial(Net().train(), loss_fn, _batches(3), tmp_path)
    trial.planned().assert_equals(trial.eager())


class _SameBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return b, a


def test_a_gradient_that_is_another_parameter(tmp_path: Path) -> None:
    """Each update reads the other parameter as it was before either changed."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5, 7)) for _ in range(2))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Pair)
        loss: torch.Tensor = _SameBack.apply(model.a, model.b)  # type: ignore[no-untyped-call]
        return loss + batch.sum() * 0

    trial = Trial(Pair(), loss_fn, [torch.randn(2) for _ in range(3)], tmp_path, _sgd())
    trial.planned().assert_equals(trial.eager())


def test_buffers_that_swap_their_values(tmp_path: Path) -> None:
    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.a, self.b = (nn.Buffer(torch.randn(6)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.weight * self.a.clone() * x).square().sum()
            old = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(old)
            return loss

    trial = Trial(Swap(), lambda m, b: m(b), [torch.randn(6) for _ in range(3)], tmp_path)
    trial.planned().assert_equals(trial.eager())


def test_memory_formats_and_shared_storages(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Parameter(torch.randn(6, 8)[:, :5])
            self.turned = nn.Parameter(torch.randn(5, 6).t())
            self.conv = nn.Conv2d(4, 6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).mean((2, 3))
            loss: torch.Tensor = ((y @ self.part) + (y @ self.turned)).square().mean()
            return loss

    model = Odd()
    trial = Trial(model, lambda m, b: m(b), [torch.randn(2, 4, 6, 6) for _ in range(3)], tmp_path)
    trial.planned().assert_close(trial.eager(), 1e-6)


def test_batches_of_another_shape(tmp_path: Path) -> None:
    trial = Trial(
        Net().train(), _loss, [*_batches(2), *_batches(2, rows=6), *_batches(1)], tmp_path
    )
    trial.planned().assert_equals(trial.eager())
    model = copy.deepcopy(trial.model)
    step = compile_step(
        model,
        _loss,
        adamw(model),
        None,
        trial.batches[0],
        machine=MACHINE,
        cache_dir=tmp_path,
        replan=False,
    )
    with step:
        step(trial.batches[0])
        with pytest.raises(PlanMismatchError, match=r"6, 8.*replan=True"):
            step(trial.batches[2])
        step(trial.batches[1])


class _Twice(nn.Module):
    """Looks places up in themselves: one argument is there as it is and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.table(places[places]))
        return found


def test_an_argument_that_stands_in_a_list_as_well(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randperm(16, generator=generator) for _ in range(3)]
    trial = Trial(_Twice(), lambda m, p: m(p).square().mean(), batches, tmp_path)
    trial.planned(64 << 20).assert_equals(trial.eager())
