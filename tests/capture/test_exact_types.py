"""Code that asks for the exact type of a tensor is refused: a trace would be told another one than a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from gascompile.capture.exact_types import require_no_exact_types
from gascompile.capture.export import capture
from gascompile.core.errors import CaptureError

_Tensor = torch.Tensor
_ARRAY = numpy.arange(3)
ASKING: dict[str, Callable[[Any, torch.Tensor], bool]] = {
    "is": lambda m, x: type(x) is torch.Tensor,
    "is not": lambda m, x: type(x) is not torch.Tensor,
    "the other way round": lambda m, x: _Tensor is type(x),
    "in": lambda m, x: type(x) in (torch.Tensor, nn.Parameter),
    "class": lambda m, x: x.__class__ is torch.Tensor,
    "name": lambda m, x: type(x).__name__ == "Tensor",
    "parameter": lambda m, x: type(m.one.weight) is nn.Parameter,
}
NOT_ASKING: dict[str, Callable[[Any, torch.Tensor], bool]] = {
    "isinstance": lambda m, x: isinstance(x, torch.FloatTensor),
    "type of the model": lambda m, x: type(m) is _Asking and isinstance(x, torch.Tensor),
    "text": lambda m, x: x.type() == "torch.FloatTensor",
    "an attribute": lambda m, x: m.type is torch.Tensor,
    "type of an array": lambda m, x: type(_ARRAY) is numpy.ndarray and bool(_ARRAY.size),
    "is a parameter": lambda m, x: isinstance(m.one.weight, nn.Parameter),
}


class _Asking(nn.Module):
    type = torch.Tensor  # type: ignore[assignment]

    def __init__(self, asks: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.one, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(x)
        return y * 2 if self.asks(self, x) else y


@pytest.mark.parametrize("name", ASKING)
def test_an_exact_type_is_refused_where_the_code_asks(name: str) -> None:
    """The message names function and line, and says what to ask in its place."""
    line = ASKING[name].__code__.co_firstlineno
    with pytest.raises(CaptureError, match=rf"test_exact_types\.py:{line}\).*isinstance"):
        capture(_Asking(ASKING[name]), (torch.ones(2, 4),), {})


@pytest.mark.parametrize("name", NOT_ASKING)
def test_what_a_trace_answers_as_a_call_does_is_taken(name: str) -> None:
    """The graph computes what eager does."""
    model, x = _Asking(NOT_ASKING[name]).eval(), torch.randn(2, 4)
    captured = capture(model, (x,), {})
    doubles = any("mul" in str(node.target) for node in captured.program.graph_module.graph.nodes)
    assert doubles is NOT_ASKING[name](model, x) is True


def test_code_of_torch_is_not_looked_at() -> None:
    """Its own answers are right in a trace."""
    require_no_exact_types([(nn.Parameter.__new__.__code__, vars(nn.parameter))])
    with pytest.raises(CaptureError):
        require_no_exact_types([(ASKING["is"].__code__, globals())])
