"""States that are more than tensors by name, hooks around a step, and losses of a selection: eager's, or refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import sgd as sgd_module
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import gascompile
from gascompile.core.errors import UnsupportedOpError
from gascompile.training.step import TrainingStep
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module, Any], torch.Tensor]
Compiler = Callable[..., TrainingStep]


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.fixture
def step_of(tmp_path: Path) -> Compiler:
    def compiled(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss = square,
        batch: Any = BATCH,
        **options: Any,
    ) -> TrainingStep:
        return gascompile.compile_step(
            model, loss, optimizer or sgd(model), "64MiB", batch, machine=MACHINE, cache_dir=tmp_path, **options
        )  # fmt: skip

    return compiled


class Renaming(nn.Module):
    """Has other names in its state than in its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Return clones by names of its own."""
        return {f"w.{name}": value.clone() for name, value in self.inner.state_dict().items()}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        """Take them back."""
        return self.inner.load_state_dict({name[2:]: value for name, value in state_dict.items()})


class Doubling(nn.Module):
    """Doubles a weight in its state by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        own: Any = self
        own.register_state_dict_post_hook(self._double)
        own.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}inner.0.weight"] = state[f"{prefix}inner.0.weight"] * 2

    @staticmethod
    def _halve(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}inner.0.weight"] = state[f"{prefix}inner.0.weight"] / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class Scaled(nn.Module):
    """Keeps a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = net(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.scale
        return found

    def get_extra_state(self) -> Any:
        """Return it."""
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.scale = state["scale"]


@pytest.mark.parametrize("make", [Renaming, Doubling, Scaled])
def test_states_are_loaded_as_the_model_loads_them(
    make: Callable[[], nn.Module], step_of: Compiler
) -> None:
    model = make()
    if isinstance(model, Scaled):
        model.scale = 3.0
    with step_of(model) as step:
        step(BATCH)
        state = copy.deepcopy(step.state_dict())
        wanted = float(step(BATCH))
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with step_of(other) as step:
        step.load_state_dict(state)
        assert float(step(BATCH)) == wanted


def test_checkpoints_refuse_a_state_beside_the_tensors(step_of: Compiler, tmp_path: Path) -> None:
    with (
        step_of(Scaled()) as step,
        pytest.raises(UnsupportedOpError, match=r"get_extra_state.*step\.state_dict"),
    ):
        step.save(tmp_path / "run")


def test_hooks_of_all_optimizers_are_refused(step_of: Compiler) -> None:
    with step_of(net()) as step:
        step(BATCH)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            handle = register(lambda *_: None)
            try:
                with pytest.raises(UnsupportedOpError, match="all optimizers have step hooks"):
                    step(BATCH)
            finally:
                handle.remove()
        step(BATCH)


@pytest.mark.parametrize(("owner", "name"), [(torch.optim.SGD, "step"), (sgd_module, "sgd")])
def test_a_part_of_the_library_that_is_replaced_is_refused(
    owner: Any, name: str, step_of: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def other(*args: Any, **options: Any) -> Any:
        return original(*args, **options)

    with step_of(net()) as step:
        step(BATCH)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            with pytest.raises(UnsupportedOpError, match=rf"{name} of torch\.optim\.sgd has been"):
                step(BATCH)
        step(BATCH)


def test_another_step_in_the_optimizers_place_is_refused_but_a_schedulers(
    step_of: Compiler,
) -> None:
    model = net()
    optimizer = sgd(model)
    schedule = StepLR(optimizer, 1)
    with step_of(model, optimizer) as step:
        step(BATCH)
        schedule.step()
        kept = optimizer.step
        optimizer.__dict__["step"] = lambda *_, **__: None
        with pytest.raises(UnsupportedOpError, match="step of the SGD has been replaced"):
            step(BATCH)
        optimizer.__dict__["step"] = kept
        step(BATCH)


@pytest.mark.filterwarnings("ignore:optimizer contains")
def test_a_parameter_that_an_optimizer_has_twice_is_refused(step_of: Compiler) -> None:
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), model.get_parameter("0.weight")], lr=0.1)
    with pytest.raises(UnsupportedOpError, match=r"'0\.weight' twice"):
        step_of(model, optimizer)


def test_a_step_within_hooks_on_saved_tensors_is_refused(step_of: Compiler) -> None:
    with step_of(net()) as step:
        step(BATCH)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t / 2, lambda t: t),
            pytest.raises(UnsupportedOpError, match="saved_tensors_hooks"),
        ):
            step(BATCH)
        step(BATCH)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.randn(4, 8, dtype=torch.complex64).conj(), "conjugated"),
        (torch.randn(4, 8).to_sparse(), "layout"),
    ],
)
def test_batches_that_are_not_plain_are_refused(
    batch: torch.Tensor, said: str, step_of: Compiler
) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x.abs() if x.is_complex() else x.to_dense()).mean()
        return found

    with pytest.raises(UnsupportedOpError, match=said):
        step_of(net(), loss=loss, batch=batch)


SELECTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: y[:, 1],
    lambda y: y[..., -1],
    lambda y: y.select(-1, 0) * y.select(0, 1).sum(),
    lambda y: y.unfold(1, 2, 1),
    lambda y: y[:, 1:][:, -1],
]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_losses_of_a_selection(
    selection: Callable[[torch.Tensor], torch.Tensor], step_of: Compiler
) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return selection(model(x)).pow(2).mean()

    model = net()
    plain = copy.deepcopy(model)
    optimizer = sgd(plain)
    with step_of(model, loss=loss) as step:
        for _ in range(3):
            found = float(step(BATCH))
            optimizer.zero_grad()
            wanted = loss(plain, BATCH)
            wanted.backward()
            optimizer.step()
            assert found == pytest.approx(float(wanted.detach()), rel=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
