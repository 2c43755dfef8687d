"""Calls within what changes what ops mean: transforms, traces and modes are refused, hooks of all modules heeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import gascompile
from gascompile.core.errors import CompiledModelError
from tests.training.runs import MACHINE

_X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[nn.Module, Any]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    folder = tmp_path_factory.mktemp("cache")
    with gascompile.compile(
        model, "1MiB", (_X,), machine=MACHINE, cache_dir=folder, fuse="off"
    ) as compiled:
        yield model, compiled


class Negative(TorchFunctionMode):
    """Takes the sine where the hyperbolic tangent is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return -found if func in (torch.tanh, torch.ops.aten.tanh.default) else found


def _with_tangents(model: Any) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(_X, _X))


def _under_a_mode(model: Any) -> Any:
    with Negative():
        return model(_X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # as such it is called here
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m: torch.func.vmap(m)(_X[None]), "torch.func"),
        (lambda m: torch.func.grad(lambda x: m(x).sum())(_X), "torch.func"),
        (lambda m: torch.func.jvp(m, (_X,), (_X,)), "torch.func"),
        (_with_tangents, "forward-mode"),
        (lambda m: torch.jit.trace(m, (_X,), check_trace=False), "torch.jit.trace"),
        (lambda m: make_fx(m)(_X), "torch.fx"),
        (lambda m: torch.export.export(m, (_X,), strict=False), "torch.export"),
        (_under_a_mode, "mode Negative"),
    ],
)
def test_calls_within_a_transform_a_trace_or_a_mode_are_refused(
    call: Callable[[Any], Any], named: str, pair: tuple[nn.Module, Any]
) -> None:
    model, compiled = pair
    with pytest.raises(CompiledModelError, match=f"{named}.* is active around its call"):
        call(compiled)
    assert torch.equal(compiled(_X), model(_X))


def test_a_default_device_is_no_mode_to_refuse(pair: tuple[nn.Module, Any]) -> None:
    model, compiled = pair
    with torch.device("cpu"):
        assert torch.equal(compiled(_X), model(_X))


def _doubles(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,) if type(module) is nn.Tanh else None


@pytest.mark.parametrize(
    "register",
    [
        lambda: register_module_forward_hook(
            lambda m, _x, y: y * 2 if type(m) is nn.Tanh else None
        ),
        lambda: register_module_forward_pre_hook(_doubles),
    ],
)
@torch.no_grad()
def test_hooks_of_all_modules_are_part_of_a_plan(
    register: Callable[[], Any], pair: tuple[nn.Module, Any]
) -> None:
    model, compiled = pair
    with register():
        assert torch.equal(compiled(_X), model(_X))
    assert torch.equal(compiled(_X), model(_X))
