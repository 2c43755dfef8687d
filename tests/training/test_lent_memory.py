"""Optimizers that nothing is known of: what their own steps do with parameters and gradients is eager's, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.core.errors import UnsupportedOpError
from tests.training.trials import Trial

BATCHES = [torch.randn(6, 16, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Network(nn.Module):
    """Has a parameter that is not always used, a frozen one, one that no optimizer has, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.extra = nn.Parameter(torch.ones(16))
        self.frozen = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.others = nn.Parameter(torch.full((8,), 3.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(x)).relu()) * self.frozen * self.others
        return made


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).square().mean()
    return value


class Base(torch.optim.Optimizer):
    """Steps by ``one``."""

    def __init__(self, parameters: Any, model: nn.Module | None = None) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.model: Any = model

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.one(parameter, self.state[parameter], group["lr"])

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Assigns(Base):
    """Gives parameters other data."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            parameter.data = parameter.data - lr * parameter.grad


class Swaps(Base):
    """Keeps the memory that a parameter had, and gives it other data."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            before = state.get("before", torch.zeros(()))
            state["before"] = parameter.data
            parameter.data = parameter.data - lr * parameter.grad + 0.01 * before


class Transposes(Base):
    """Gives matrices data that lie in another order, over the memory that they had."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is None:
            return
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.t()
        parameter.add_(parameter.grad, alpha=-lr)


class KeepsGradients(Base):
    """Keeps the gradient itself for the next step."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            parameter.sub_(lr * parameter.grad + lr * state.get("last", 0))
            state["last"] = parameter.grad


class DecaysAll(Base):
    """Changes parameters that have no gradient, frozen ones and those of the model that it does not have."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        parameter.mul_(0.9)
        parameter.data.mul_(0.9)
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-lr * float(self.model.norm.running_var.mean()))
        self.model.others.mul_(0.99)


class KeepsMemory(Base):
    """Keeps a parameter's memory."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            state["alias"] = parameter.detach()
            parameter.add_(parameter.grad, alpha=-lr)


class KeepsElsewhere(Base):
    """Keeps gradients in a list of its own."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            self.__dict__.setdefault("seen", []).append(parameter.grad)


class Holder:
    """Has attributes."""


class KeepsInObject(Base):
    """Keeps gradients where nobody would look."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            state.setdefault("holder", Holder()).grad = parameter.grad


class KeepsFlat(Base):
    """Puts parameters into one tensor that it keeps where nobody would look, and changes that."""

    def step(self, closure: Any = None) -> Any:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            holder = vars(self).setdefault("holder", Holder())
            holder.flat = torch.cat([p.detach().flatten() for p in trained])
            for parameter, part in zip(
                trained, holder.flat.split([p.numel() for p in trained]), strict=True
            ):
                parameter.data = part.view_as(parameter)


class FillsFlat(Base):
    """Puts parameters into one tensor and forgets it."""

    def step(self, closure: Any = None) -> Any:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            flat = torch.cat([(p - 0.1 * p.grad).flatten() for p in trained])
            nn.utils.vector_to_parameters(flat, trained)


class KeepsTwice(Base):
    """Keeps two views of a gradient."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            state["one"], state["two"] = parameter.grad, parameter.grad.detach()


class KeepsOneTwice(Base):
    """Keeps one gradient under two keys, and changes it by one of them."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            if "one" in state:
                state["one"].mul_(0.5)
                parameter.sub_(lr * state["two"])
            parameter.sub_(lr * parameter.grad)
            state["one"] = state["two"] = parameter.grad


class KeepsNew(Base):
    """Gives a parameter the memory of its state."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            state["new"] = parameter.data - lr * parameter.grad
            parameter.data = state["new"]


class Reshapes(Base):
    """Gives parameters another shape."""

    def one(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        if parameter.grad is not None:
            parameter.data = parameter.data[None]


class Wraps(Base):
    """Steps by another optimizer, which keeps gradients."""

    def __init__(self, parameters: Any, model: nn.Module | None = None) -> None:
        super().__init__(parameters, model)
        self.inner = KeepsGradients(self.param_groups, model)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def trial(kind: type[Base], folder: Path) -> Trial:
    torch.manual_seed(0)
    options = {"unplanned_optimizer": True}
    return Trial(
        Network(),
        loss_fn,
        BATCHES,
        folder,
        lambda model: kind([p for p in model.parameters() if p is not model.others], model),
        options=options,
    )


@pytest.mark.parametrize(
    "kind", [Assigns, Swaps, Transposes, KeepsGradients, KeepsOneTwice, DecaysAll, Wraps]
)
def test_steps_of_ones_own_are_eager(kind: type[Base], tmp_path: Path) -> None:
    run = trial(kind, tmp_path)
    run.planned().assert_equals(run.eager())


@pytest.mark.parametrize(
    "kind", [KeepsMemory, KeepsElsewhere, KeepsNew, KeepsInObject, KeepsTwice, KeepsFlat]
)
def test_memory_that_other_tensors_get_is_not_kept(kind: type[Base], tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedOpError, match=f"step\\(\\) of {kind.__name__} keeps the memory of 'first"
    ):
        trial(kind, tmp_path).planned()


def test_parameters_keep_their_shapes(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match=r"gives 'first\.weight' another shape"):
        trial(Reshapes, tmp_path).planned()


class Ties(Base):
    """Lets two parameters be one."""

    def step(self, closure: Any = None) -> Any:
        self.model.norm.weight.data = self.model.first.bias.data


class TiesNew(Base):
    """Puts two parameters into new memory that they share."""

    def step(self, closure: Any = None) -> Any:
        self.model.norm.weight.data = self.model.first.bias.data = torch.ones(16)


@pytest.mark.parametrize("kind", [Ties, TiesNew])
def test_parameters_that_become_one_are_refused(kind: type[Base], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match=f"{kind.__name__} gives '.*' memory of '"):
        trial(kind, tmp_path).planned()


class Flat(Base):
    """Puts parameters into one tensor of its own when it is made."""

    def __init__(self, parameters: Any, model: nn.Module | None = None) -> None:
        super().__init__(parameters, model)
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.flat = torch.cat([p.detach().flatten() for p in trained])
        parts = self.flat.split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.data = part.view_as(parameter)

    def step(self, closure: Any = None) -> Any:
        self.flat.mul_(0.9)


def test_parameters_whose_memory_an_optimizer_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match="Flat keeps the memory of a parameter"):
        trial(Flat, tmp_path).planned()


def test_memory_that_parameters_have_left_can_be_read(tmp_path: Path) -> None:
    run = trial(DecaysAll, tmp_path)
    model = Network()
    linear = model.first
    flat = torch.cat([p.detach().flatten() for p in linear.parameters()])
    parts = flat.split([p.numel() for p in linear.parameters()])
    for parameter, part in zip(linear.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)
    before = flat.clone()
    with run.compiled(model, DecaysAll(linear.parameters(), model), None) as step:
        step(BATCHES[0])
        assert torch.equal(flat, before)
