"""A model that asks whether gradients are recorded: planned where the answer decides nothing, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.capture.export import capture
from gascompile.capture.record.record import CaptureRecord
from gascompile.core.errors import CaptureError

Body = Callable[[Any, torch.Tensor], Any]


class _Asking(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.one, self.two, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def _in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.one(x)
    z = y * 2
    if torch.is_grad_enabled():
        y.add_(1)
    return y + z


def _autocast(m: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.is_grad_enabled()):
        return m.one(x).float()


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    causal = torch.is_grad_enabled()
    return functional.scaled_dot_product_attention(
        m.one(x)[None], x[None], x[None], is_causal=causal
    )


DECIDING: dict[str, Body] = {
    "a number": lambda m, x: m.one(x) * (2.0 if torch.is_grad_enabled() else 3.0),
    "which weights": lambda m, x: (m.one if torch.is_grad_enabled() else m.two)(x),
    "their order": lambda m, x: m.one(m.two(x)) if torch.is_grad_enabled() else m.two(m.one(x)),
    "which value": lambda m, x: torch.cat([m.one(x), x if torch.is_grad_enabled() else m.two(x)]),
    "detached of which": lambda m, x: (
        (m.one if torch.is_grad_enabled() else m.two).weight.detach() @ x.T
    ),
    "a constant": lambda m, x: m.one(x) + torch.tensor([1.0, 2.0 + torch.is_grad_enabled(), 3, 4]),
    "an array": lambda m, x: (
        m.one(x) + torch.from_numpy(numpy.full(4, torch.is_grad_enabled(), numpy.float32))
    ),
    "a dtype": lambda m, x: m.one(x).to(
        torch.float64 if torch.is_grad_enabled() else torch.float32
    ),
    "an op": lambda m, x: torch.relu(m.one(x)) if torch.is_grad_enabled() else torch.tanh(m.one(x)),
    "which pool": lambda m, x: (
        functional.max_pool1d(m.one(x), 2)
        if torch.is_grad_enabled()
        else functional.adaptive_max_pool1d(m.one(x), 2)
    ),
    "an argument by name": lambda m, x: torch.sum(m.one(x), dim=0, keepdim=torch.is_grad_enabled()),
    "what is returned": lambda m, x: (m.one(x), x if torch.is_grad_enabled() else m.table),
    "a value that is no tensor": lambda m, x: (m.one(x), torch.is_grad_enabled()),
    "more of them": lambda m, x: (m.one(x),) * (1 + torch.is_grad_enabled()),
    "the format around": _autocast,
    "a write": _in_place,
    "attention": _attention,
    "an answer of a value": lambda m, x: m.two(x) if m.one(x).requires_grad else m.one(x),
}
IDLE: dict[str, Body] = {
    "nothing": lambda m, x: m.one(x) if torch.is_grad_enabled() or m.one else m.two(x),
    "with a switch": lambda m, x: m.one(x) if torch.is_grad_enabled() and m.training else m.two(x),
    "constants": lambda m, x: (
        m.one(x) + m.table + torch.tensor([1.0 if torch.is_grad_enabled() or m.one else 2.0])
    ),
    "dropout that is off": lambda m, x: (
        functional.dropout(m.one(x), 0.5, training=torch.is_grad_enabled() and m.training) + x
    ),
    "many ops": lambda m, x: functional.layer_norm(
        torch.split(m.one(x), 2, dim=-1)[torch.is_grad_enabled() * 0].contiguous(), (2,)
    ),
}


@pytest.mark.parametrize("what", DECIDING)
def test_what_the_answer_decides_is_refused(what: str) -> None:
    model, x = _Asking(DECIDING[what]).eval(), torch.randn(3, 4)
    with torch.enable_grad(), pytest.raises(CaptureError, match="where gradients are recorded"):
        capture(model, (x,), {})
    with torch.no_grad():
        capture(model, (x,), {})


def _by_default(x: torch.Tensor, ask: Callable[[], bool] = torch.is_grad_enabled) -> torch.Tensor:
    return x * (2.0 if ask() else 3.0)


UNTOLD: dict[str, Body] = {
    "a default": lambda m, x: _by_default(m.one(x)),
    "an attribute": lambda m, x: m.one(x) * (2.0 if m.ask() else 3.0),
    "torch's own": lambda m, x: m.one(x) * (2.0 if torch._C.is_grad_enabled() else 3.0),
}


@pytest.mark.parametrize("what", UNTOLD)
def test_names_by_which_nobody_can_be_told_another_answer_are_refused(what: str) -> None:
    model, x = _Asking(UNTOLD[what]).eval(), torch.randn(3, 4)
    vars(model)["ask"] = torch.is_grad_enabled
    with torch.enable_grad(), pytest.raises(CaptureError, match="is no global of its code"):
        capture(model, (x,), {})
    with torch.no_grad():
        capture(model, (x,), {})


@pytest.mark.parametrize("what", IDLE)
def test_one_trace_is_enough_where_the_answer_decides_nothing(what: str) -> None:
    model, x = _Asking(IDLE[what]).eval(), torch.randn(3, 4)
    with mock.patch("torch.export.export", wraps=torch.export.export) as export:
        captured = capture(model, (x,), {})
    assert export.call_count == 1, "on fake tensors alone it can be seen"
    assert isinstance(captured.record, CaptureRecord)
    assert not captured.record.running.settings


def test_tensors_that_nobody_registered_are_captured_as_before() -> None:
    """They have no name in the model, and in a trace others stand in their place."""
    array = numpy.arange(4, dtype=numpy.float32)
    hidden = [nn.Linear(4, 4).eval().requires_grad_(False)]

    def body(m: Any, x: torch.Tensor) -> Any:
        y = m.one(x) if torch.is_grad_enabled() or m.one else x
        return hidden[0](y) + torch.from_numpy(array)

    capture(_Asking(body).eval(), (torch.randn(3, 4),), {})


def test_what_cannot_be_compared_on_fake_tensors_is_traced_again() -> None:
    """What is callable among an op's arguments may be code, whose calls nobody follows."""

    def body(m: Any, x: torch.Tensor) -> Any:
        y: Any = m.one(x) if torch.is_grad_enabled() or m.one else x
        return y.type(torch.DoubleTensor)

    with mock.patch("torch.export.export", wraps=torch.export.export) as export:
        capture(_Asking(body).eval(), (torch.randn(3, 4),), {})
    assert export.call_count == 2
