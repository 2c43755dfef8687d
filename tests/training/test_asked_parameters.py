"""What a loss asks of parameters is answered as in eager, or refused: what stands for them in a trace differs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import UnsupportedOpError

FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a parameter": lambda t: isinstance(t, nn.Parameter),
    "a buffer": lambda t: isinstance(t, nn.Buffer),
    "a leaf": lambda t: t.is_leaf,
    "made by an op": lambda t: t.grad_fn is not None,
    "wants a gradient": lambda t: t.requires_grad,
    "a view": lambda t: t._is_view(),
    "layout": lambda t: t.layout,
    "type": lambda t: t.type(),
    "strides": lambda t: t.stride(),
    "bytes": lambda t: t.untyped_storage().nbytes(),
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("offset", torch.randn(8))


def _step(
    loss: Callable[[Any, torch.Tensor], torch.Tensor], model: nn.Module, batch: torch.Tensor
) -> Any:
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)  # type: ignore[union-attr]
    return gascompile.compile_step(model, loss, optimizer, "64MiB", batch)


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_tensors_are_those_of_eager(name: str) -> None:
    """Of trained and frozen parameters, a buffer, the batch, values and views."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        hidden = model.trained(batch)
        asked = (
            model.trained.weight, model.frozen.weight, model.offset, batch, hidden, model.trained.weight.t(),
            model.trained.weight.detach(), next(model.parameters()),
        )  # fmt: skip
        told = [zlib.crc32(repr(FACTS[name](tensor)).encode()) % 997 for tensor in asked]
        value: torch.Tensor = hidden.square().mean() + sum(
            answer * place for place, answer in enumerate(told, 1)
        )
        return value

    model, batch = _Model(), torch.randn(2, 8)
    wanted = loss(model, batch).item()
    with _step(loss, model, batch) as step:
        assert step(batch).item() == pytest.approx(wanted, rel=1e-6)


def test_a_step_takes_the_course_of_eager() -> None:
    """A loss that decides by what it asks has eager's value."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model.trained(batch).square().mean()
        for weight in (model.trained.weight, model.frozen.weight):
            value = value * 3 if isinstance(weight, nn.Parameter) and weight.is_leaf else value
        return value

    model, batch = _Model(), torch.randn(2, 8)
    wanted = loss(model, batch).item()
    with _step(loss, model, batch) as step:
        assert step(batch).item() == pytest.approx(wanted, rel=1e-6)


def test_a_loss_that_reads_gradients_is_refused() -> None:
    """Eager would find those that were added up so far."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model.trained(batch).square().mean()
        return value if model.trained.weight.grad is None else value * 2

    with pytest.raises(UnsupportedOpError, match=r"reads the gradient of 'trained.weight'"):
        _step(loss, _Model(), torch.randn(2, 8))


def test_gradients_of_frozen_parameters_may_be_read() -> None:
    """They have none, in eager as well."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model.trained(batch).square().mean()
        return value if model.frozen.weight.grad is None else value * 2

    model, batch = _Model(), torch.randn(2, 8)
    wanted = loss(model, batch).item()
    with _step(loss, model, batch) as step:
        assert step(batch).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_function_in_a_loss_is_traced() -> None:
    """It sees what stands within torch's wrappers, which is none of the loss's own tensors."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    scripted: Any = torch.jit.script(gate)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = scripted(model.trained(batch)).square().mean()
        return value

    model, batch = _Model(), torch.randn(2, 8)
    wanted = loss(model, batch).item()
    with _step(loss, model, batch) as step:
        assert step(batch).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("removes", [True, False])
def test_hooks_that_stay_on_parameters_are_refused(removes: bool) -> None:
    """One that is removed at once changes nothing, in eager as well."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        handle = model.trained.weight.register_hook(lambda gradient: gradient * 2)
        if removes:
            handle.remove()
        value: torch.Tensor = model.trained(batch).square().mean()
        return value

    model, batch = _Model(), torch.randn(2, 8)
    if not removes:
        with pytest.raises(UnsupportedOpError, match=r"leaves a gradient hook on 'trained.weight'"):
            _step(loss, model, batch)
        return
    wanted = loss(model, batch).item()
    with _step(loss, model, batch) as step:
        assert step(batch).item() == pytest.approx(wanted, rel=1e-6)
