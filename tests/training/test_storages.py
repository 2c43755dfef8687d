"""Tensors that share memory: views follow in the steps, as in eager, and are what they were after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import CaptureError, InfeasiblePlanError
from gascompile.training.state.aliasing import Storages, ViewLayout
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, Optimizers, adamw

WIDTH = 48
BATCH = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def mse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


class Base(nn.Module):
    """A layer, and what subclasses share of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class BufferOfParameter(Base):
    """A buffer is a transposed parameter, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", self.one.weight.detach().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x) @ self.get_buffer("turned"))
        return found


class AttributeOfParameter(Base):
    """A plain attribute is a transposed parameter through which its gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = self.one.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x) @ self.turned)
        return found


class ChangingBuffers(Base):
    """A buffer and two views of it, all of which the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.rand(2 * WIDTH)
        self.register_buffer("low", whole[:WIDTH])
        self.register_buffer("high", whole[WIDTH:].view(2, -1))
        self.register_buffer("whole", whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high, whole = (self.get_buffer(name) for name in ("low", "high", "whole"))
        if self.training:
            low.mul_(1.5)
            high[0].add_(0.1)
        found: torch.Tensor = self.two(self.one(x) * low.clone() + whole[8 : 8 + WIDTH].clone())
        if self.training:
            whole.mul_(0.9)
        return found


class ParameterOfParameter(Base):
    """A parameter is a part of another; each is updated by its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Linear(WIDTH, WIDTH // 2)
        self.three.weight.data = self.one.weight.data[WIDTH // 2 :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(
            self.three(torch.relu(self.one(x))).repeat(1, 2) + self.one(x)
        )
        return found


class PartsOfOne(Base):
    """Parameters are parts of a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.randn(2 * WIDTH * WIDTH) / WIDTH
        self.one.weight.data = self.memory[: WIDTH * WIDTH].view(WIDTH, WIDTH)
        self.two.weight.data = self.memory[WIDTH * WIDTH :].view(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(torch.relu(self.one(x)))
        return found


class Columns(Base):
    """Parameters lie between each other, column by column."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(WIDTH, 2 * WIDTH) / WIDTH
        self.one.weight.data, self.two.weight.data = memory[:, :WIDTH], memory[:, WIDTH:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(torch.relu(self.one(x)))
        return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def aliases(model: nn.Module) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Return which tensors share memory, and where in it they lie."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    tensors |= {k: v for k, v in vars(model).items() if isinstance(v, torch.Tensor)}
    groups: dict[int, int] = {}
    return {
        name: (
            groups.setdefault(tensor.untyped_storage()._cdata, len(groups)),
            int(tensor.storage_offset()),
            tensor.stride(),
        )
        for name, tensor in tensors.items()
    }


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """Return the same model each time; a deep copy would take views apart."""
    torch.manual_seed(0)
    return kind()


def trained(
    kind: Callable[[], nn.Module], make: Optimizers, **options: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses of four planned steps and the state after them; the model has its views again."""
    model = made(kind)
    before = aliases(model)
    with compile_step(model, mse, make(model), None, BATCH, machine=MACHINE, **options) as step:
        losses = [step(BATCH) for _ in range(4)]
        step.eval(BATCH)
        state = step.state_dict()["model"]
    assert aliases(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return losses, state


def eager(
    kind: Callable[[], nn.Module], make: Optimizers, *, every: int = 1, limit: float = 1e9
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the same of plain torch."""
    model = made(kind)
    optimizer = make(model)
    losses = []
    for number in range(4):
        loss = mse(model, BATCH)
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % every == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize(
    "kind",
    [
        BufferOfParameter,
        AttributeOfParameter,
        ChangingBuffers,
        ParameterOfParameter,
        PartsOfOne,
        Columns,
    ],
)
def test_views_follow_and_are_views_again(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    losses, state = trained(kind, sgd, cache_dir=tmp_path)
    plain_losses, plain_state = eager(kind, sgd)
    assert losses == plain_losses
    assert state.keys() == plain_state.keys()
    assert all(torch.equal(value, plain_state[name]) for name, value in state.items())


def test_views_under_clipping_and_accumulation(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.1, "accumulate": 2, "cache_dir": tmp_path}
    losses, state = trained(ParameterOfParameter, adamw, **options)
    plain_losses, plain_state = eager(ParameterOfParameter, adamw, every=2, limit=0.1)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(state, plain_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [BufferOfParameter, ParameterOfParameter])
def test_views_in_the_smallest_budget(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "machine": MACHINE,
        "cache_dir": tmp_path,
        "time_limit_s": PLANNING_S,
    }
    model = made(kind)
    with pytest.raises(InfeasiblePlanError) as caught:
        compile_step(model, mse, adamw(model), 1, BATCH, **options)
    before = aliases(model)
    with compile_step(
        model, mse, adamw(model), caught.value.required_bytes, BATCH, **options
    ) as step:
        losses = [step(BATCH) for _ in range(4)]
    assert aliases(model) == before
    plain_losses, plain_state = eager(kind, adamw)
    assert losses == plain_losses
    assert all(torch.equal(v, plain_state[name]) for name, v in model.state_dict().items())


def test_views_go_through_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ParameterOfParameter()
    model.register_buffer("turned", model.one.weight.detach().t())
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    with compile_step(model, mse, sgd(model), "64MiB", BATCH, **options) as step:
        step(BATCH)
        step.save(tmp_path / "run")
        kept = step.state_dict()
        expected = [float(step(BATCH)) for _ in range(3)]
    before = aliases(model)
    with compile_step(model, mse, sgd(model), "64MiB", BATCH, **options) as step:
        step.load(tmp_path / "run")
        assert [float(step(BATCH)) for _ in range(3)] == expected
        step.load_state_dict(kept)
        assert [float(step(BATCH)) for _ in range(3)] == expected
    assert aliases(model) == before


def test_states_that_are_kept_do_not_stand_for_views_of_what_is_written(tmp_path: Path) -> None:
    model = made(BufferOfParameter)
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    with compile_step(model, mse, sgd(model), "64MiB", BATCH, **options) as step, torch.no_grad():
        step(BATCH)
        for name, other in (("one.weight", "turned"), ("turned", "one.weight")):
            kept = model.state_dict()
            (model.get_parameter if name != "turned" else model.get_buffer)(name).add_(1)
            now = model.state_dict()
            assert torch.equal(now[other], kept[other] + 1)


def test_states_that_are_kept_do_not_stand_for_what_is_loaded(tmp_path: Path) -> None:
    model = made(BufferOfParameter)
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    with compile_step(model, mse, sgd(model), "64MiB", BATCH, **options) as step:
        step.save(tmp_path / "run")
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        step(BATCH)
        kept = model.state_dict()
        step.load(tmp_path / "run")
        now = model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in wanted.items())
        assert not torch.equal(kept["turned"], wanted["turned"])


def test_a_write_to_a_view_leaves_the_rest_of_its_owner(tmp_path: Path) -> None:
    model = made(ParameterOfParameter)
    expected = made(ParameterOfParameter)
    with (
        compile_step(
            model, mse, sgd(model), "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        ) as step,
        torch.no_grad(),
    ):
        for is_away in (False, True):
            persistent = step._open_states().persistent
            persistent.rest(persistent.sizes if is_away else ())
            for changed in (model, expected):
                changed.get_parameter("three.weight").mul_(2)
            found = step.state_dict()["model"]
            assert all(torch.equal(v, found[k]) for k, v in expected.state_dict().items())


def test_a_model_that_cannot_be_captured_keeps_its_memory(tmp_path: Path) -> None:
    model = Columns()
    before, values = aliases(model), copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError):
        compile_step(
            model,
            lambda m, b: m(b),
            sgd(model),
            "64MiB",
            BATCH,
            machine=MACHINE,
            cache_dir=tmp_path,
        )
    assert aliases(model) == before
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[2:4],
        lambda t: t.t()[1:3],
        lambda t: t[:, 1:3],
        lambda t: t[::2, ::3],
        lambda t: t.diagonal(),
        lambda t: t[1].expand(3, -1),
        lambda t: t.view(2, 3, 2, 3).permute(2, 0, 3, 1),
    ],
)
def test_traced_views_are_the_same_elements(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for whole in (torch.arange(36.0).view(6, 6), torch.arange(36.0).view(6, 6).t()):
        flat = torch.arange(36.0)
        view = part(flat.view(6, 6))
        found = ViewLayout.of(view).traced_within(whole)
        assert found.untyped_storage()._cdata == whole.untyped_storage()._cdata
        assert torch.equal(found, view)


def test_views_of_another_type_are_refused() -> None:
    model = Base()
    model.register_buffer("bits", model.one.weight.detach().view(torch.int32))
    with pytest.raises(
        CaptureError, match=r"'one.weight' and 'bits' share memory as torch\.float32"
    ):
        Storages(model)
