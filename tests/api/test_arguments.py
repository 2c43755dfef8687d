"""Arguments without sense are refused at once: before a machine is measured or a model captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.plain_tensors import require_plain_model
from gascompile.core.errors import CaptureError


def _any(value: Any) -> Any:
    return value


@pytest.fixture(autouse=True)
def _nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("this takes long")

    monkeypatch.setattr("gascompile.api.compile.resolve_machine", slow)
    monkeypatch.setattr("gascompile.api.plan.machine_of", slow)


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda m: gascompile.compile(m, "1MiB", strategy="nope"), ValueError, "unknown strategy"),
        (lambda m: gascompile.compile(m, "12 parsecs"), ValueError, "parsecs"),
        (lambda m: gascompile.compile(m, "1MiB", _any(torch.ones(2))), TypeError, r"\(x,\)"),
        (lambda m: gascompile.compile(m, "1MiB", weights="int3"), ValueError, "int3"),
        (lambda m: gascompile.compile(_any([m]), "1MiB"), TypeError, "not list"),
        (lambda m: gascompile.plan(m, "1MiB", strategy="nope"), ValueError, "unknown strategy"),
        (lambda m: gascompile.plan("nope", "1MiB"), gascompile.FormatError, "cannot open 'nope'"),
    ],
)
def test_it_is_refused_at_once(
    ask: Callable[[Any], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ask(nn.Linear(2, 2))


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'0\.weight' has no shape yet; call the model once"):
        require_plain_model(nn.Sequential(nn.LazyLinear(8)))
