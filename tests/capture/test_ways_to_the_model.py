"""Models whose code reaches their own weights past ``self``: by functions that hold them, references, or globals."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from tests.training.trials import MACHINE

X = torch.linspace(-1, 1, 16).view(2, 8)
_model: dict[str, nn.Module] = {}


class Layered(nn.Module):
    """One layer, and whatever ways lead to it."""

    def __init__(self, way: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.way = way(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(x)


def closure(model: Any) -> Any:
    return lambda x: model.layer(x) * 2


def default(model: Any) -> Any:
    return lambda x, of=model: of.layer(x) * 2


def in_a_list(model: Any) -> Any:
    held = [lambda x: model.layer(x) * 2]
    return lambda x: held[0](x) + 0


def recursive(model: Any) -> Any:
    def twice(x: torch.Tensor, times: int = 2) -> Any:
        return twice(model.layer(x), times - 1) if times else x

    return twice


def shared(model: Any) -> Any:
    """Two functions with one variable, which one of them sets."""
    layer = None

    def look() -> None:
        nonlocal layer
        layer = model.layer

    def use(x: torch.Tensor) -> Any:
        look()
        assert layer is not None
        return layer(x) * 2

    return use


def wrapped(model: Any) -> Any:
    inner = functools.partial(lambda of, x: of.layer(x), model)

    @functools.wraps(inner)
    def outer(x: torch.Tensor) -> Any:
        return inner(x) * 2

    return outer


def method(model: Any) -> Any:
    return types.MethodType(lambda of, x: of.layer(x) * 2, model)


def weak(model: Any) -> Any:
    of = weakref.ref(model)
    return lambda x: of().layer(x) * 2  # type: ignore[union-attr]


def counting(model: Any) -> Any:
    def count(x: torch.Tensor) -> Any:
        model.count += 1
        return model.layer(x) * model.count

    return count


def beside_a_lock(model: Any) -> Any:
    held = (model, threading.Lock())
    return lambda x: held[0].layer(x) * 2


class Uncopied:
    """Stays itself where it is copied."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: object) -> Uncopied:
        return self

    def __call__(self, x: torch.Tensor) -> Any:
        return self.model.layer(x) * 2


def by_a_global(model: Any) -> Any:
    _model["is"] = model
    return lambda x: _model["is"].get_submodule("layer")(x) * 2


WAYS = [
    closure, default, in_a_list, recursive, shared, wrapped, method, weak, counting, beside_a_lock, Uncopied,
    by_a_global,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_models_of_each_call(way: Callable[[Any], Any], tmp_path: Path) -> None:
    """After the capture, in another model that finds the plan, and when they change."""
    for seed in range(2):
        torch.manual_seed(seed)
        twin = Layered(way).eval()
        torch.manual_seed(seed)
        model = Layered(way).eval()
        options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
        with gascompile.compile(model, "8MiB", (X,), **options) as compiled, torch.no_grad():
            for _ in range(2):
                given = compiled(X)
                torch.testing.assert_close(given, _of(twin, model, way))
            for changed in (model, twin):
                changed.layer.weight.mul_(2.0)
            given = compiled(X)
            torch.testing.assert_close(given, _of(twin, model, way))


def _of(twin: nn.Module, model: nn.Module, way: object) -> torch.Tensor:
    _model["is"] = twin
    expected: torch.Tensor = twin(X)
    _model["is"] = model
    return expected


def value_of(model: Any) -> Any:
    return lambda x: x * model().count.item()


def written(model: Any) -> Any:
    def count(x: torch.Tensor) -> Any:
        model().count += 1
        return x * model().count

    return count


@pytest.mark.parametrize("reads", [value_of, written])
@pytest.mark.parametrize("is_global", [False, True])
def test_what_no_graph_shows_is_refused(
    reads: Callable[[Any], Any], is_global: bool, tmp_path: Path
) -> None:
    """Where the model is reached past its twin; it is as it was."""

    def way(model: Any) -> Any:
        held, _model["is"] = (model, threading.Lock()), model
        return reads((lambda: _model["is"]) if is_global else (lambda: held[0]))

    model = Layered(way).eval()
    with pytest.raises(gascompile.CaptureError, match=r"'count' .* which it reaches past self"):
        gascompile.compile(model, "8MiB", (X,), machine=MACHINE, cache_dir=tmp_path)
    assert not model.get_buffer("count")


@pytest.mark.parametrize("of_part", [False, True])
def test_a_forward_that_is_wrapped(of_part: bool, tmp_path: Path) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model = Layered(method).eval()
        part: Any = model.layer if of_part else model
        forward = part.forward
        part.forward = lambda x, of=forward: of(x) + 1
        options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
        with gascompile.compile(model, "8MiB", (X,), **options) as compiled, torch.no_grad():
            for factor in (1.0, 3.0):
                model.layer.weight.mul_(factor)
                layer = nn.functional.linear(X, model.layer.weight, model.layer.bias)
                expected = (layer + 1) * 2 if of_part else layer * 2 + 1
                torch.testing.assert_close(compiled(X), expected)
