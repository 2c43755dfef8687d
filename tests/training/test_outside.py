"""Tensors that a loss has from outside the model: read at every step as they are then, and never trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import CaptureError, PlanMismatchError
from gascompile.training.step import TrainingStep
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, Loss, Trial, adamw

Batch = tuple[torch.Tensor, torch.Tensor]
WIDTH = 12


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, WIDTH, generator=generator), torch.randint(0, WIDTH, (6,)))
        for _ in range(count)
    ]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH))


def compiled(model: nn.Module, loss_fn: Loss, folder: Path, optimizer: Any = None) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        optimizer or adamw(model),
        "64MiB",
        batches(1)[0],
        machine=MACHINE,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
    )


def class_weights() -> Loss:
    weights = torch.rand(WIDTH)
    criterion = nn.CrossEntropyLoss(weight=torch.rand(WIDTH))
    return lambda m, b: (
        functional.cross_entropy(m(b[0]), b[1], weight=weights) + criterion(m(b[0]), b[1])
    )


def frozen_teacher() -> Loss:
    teacher = network().requires_grad_(False)
    return lambda m, b: functional.mse_loss(m(b[0]), teacher(b[0]))


def teacher_that_wants_gradients() -> Loss:
    teacher = network()
    return lambda m, b: functional.mse_loss(m(b[0]), teacher(b[0]))


def masks() -> Loss:
    mask, turned = torch.rand(6, WIDTH) > 0.5, torch.rand(WIDTH, 6).t()
    return lambda m, b: (m(b[0]) * mask * turned[:, :1] * torch.tensor([2.0])).square().mean()


def the_model_itself(model: nn.Module) -> Loss:
    parameters = list(model.parameters())
    return lambda m, b: (
        functional.cross_entropy(model(b[0]), b[1])
        + 0.1 * sum(p.square().sum() for p in parameters)
    )


@pytest.mark.parametrize(
    "make", [class_weights, frozen_teacher, teacher_that_wants_gradients, masks]
)
def test_tensors_from_outside_are_eager(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trial = Trial(network(), make(), batches(4), tmp_path)
    trial.planned().assert_equals(trial.eager())


def test_a_model_from_outside_is_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network()
    twin = copy.deepcopy(model)
    optimizer = adamw(twin)
    with compiled(model, the_model_itself(model), tmp_path) as step:
        for batch in batches(3):
            loss = the_model_itself(twin)(twin, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert torch.equal(step(batch), loss.detach())
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_teacher_stays_what_it_is_and_has_no_gradients(tmp_path: Path) -> None:
    teacher, model = network(), network()
    before = copy.deepcopy(teacher.state_dict())
    with compiled(
        model, lambda m, b: functional.mse_loss(m(b[0]), teacher(b[0])), tmp_path
    ) as step:
        for batch in batches(2):
            step(batch)
        assert not set(step.state_dict()["model"]) - set(before)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


class Moves(nn.Module):
    """Moves a table to the device of its input at each call, as rotary embeddings do, and keeps what it is there."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.table, self.dtype = nn.Linear(WIDTH, WIDTH), torch.rand(WIDTH), dtype
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(x.device, self.dtype).contiguous()
        scale: Any = self.scale
        scale.copy_(torch.where(x.sum() > 0, self.table, scale))
        found: torch.Tensor = self.layer(x) * scale * self.table.float()
        return found


def test_a_table_that_is_moved_where_it_is_stays_what_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Moves(torch.float32)
    table = model.table
    trial = Trial(model, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), batches(4), tmp_path)
    trial.planned().assert_equals(trial.eager())
    assert model.table is table


def test_a_table_that_each_call_converts_anew_is_refused(tmp_path: Path) -> None:
    model = Moves(torch.float64)
    with pytest.raises(CaptureError):
        compiled(model, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), tmp_path)
    assert model.table.dtype is torch.float32


def test_values_are_read_at_every_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, scale = network(), torch.tensor(1.0)
    twin = copy.deepcopy(model)
    optimizer = adamw(twin)

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * scale

    with compiled(model, loss_fn, tmp_path) as step:
        for batch in batches(3):
            scale.mul_(0.5)
            loss = loss_fn(twin, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert torch.equal(step(batch), loss.detach())
            assert float(step.eval(batch)) == float(loss_fn(twin, batch).detach())
        scale.data = torch.ones(2)
        with pytest.raises(PlanMismatchError, match=r"was \[\] and is \[2\]"):
            step(batch)
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in model.state_dict().items())


def test_changing_a_tensor_from_outside_is_refused(tmp_path: Path) -> None:
    centre = torch.zeros(WIDTH)

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = model(batch[0])
        centre.mul_(0.9).add_(found.detach().mean(0))
        loss: torch.Tensor = (found - centre).square().mean()
        return loss

    with pytest.raises(CaptureError, match="outside the model in place; register it as a buffer"):
        compiled(network(), loss_fn, tmp_path)
    assert not centre.any()


def test_a_trained_parameter_from_outside_is_refused(tmp_path: Path) -> None:
    model, temperature = network(), nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(ValueError, match="none of the model's"):
        compiled(model, lambda m, b: (m(b[0]) * temperature).mean(), tmp_path, optimizer)


def test_memory_of_parameters_that_is_no_buffer_is_refused(tmp_path: Path) -> None:
    model, memory = nn.Linear(WIDTH, WIDTH), torch.randn(2 * WIDTH * WIDTH)
    model.weight.data = memory[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    with pytest.raises(CaptureError, match="shares memory with 'weight'; register it as a buffer"):
        compiled(model, lambda m, b: m(b[0]).mean() + memory.sum(), tmp_path)
    assert model.weight.data_ptr() == memory.data_ptr()
