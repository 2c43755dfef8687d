"""Code around a model's ``forward`` that sees how a call is written: what has no name there has none in a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile import CompiledModel
from gascompile.core.errors import CaptureError
from tests.training.runs import MACHINE


class Plain(nn.Module):
    """Takes two inputs, of which one has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, by: torch.Tensor | float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * by
        return out


def _doubled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, *(2 * value for value in args), **kwargs)

    return call


class Decorated(Plain):
    forward = _doubled(Plain.forward)


class Called(Plain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*(2 * value for value in args), **kwargs)


def _twice(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(2 * value for value in args)


def _with_names(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(2 * value for value in args), {name: 3 * value for name, value in kwargs.items()}


def _added(_: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
    return torch.stack([out, *(value.sum().expand_as(out) for value in args)]).sum(0)


def _hooked(*hooks: tuple[str, Any, dict[str, Any]]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Plain()
        for name, hook, options in hooks:
            getattr(model, name)(hook, **options)
        return model

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decorated": Decorated,
    "own call": Called,
    "before": _hooked(("register_forward_pre_hook", _twice, {})),
    "before, with names": _hooked(
        ("register_forward_pre_hook", _with_names, {"with_kwargs": True})
    ),
    "after": _hooked(("register_forward_hook", _added, {})),
}


def _compiled(model: nn.Module, cache: Path, example: Any = None) -> CompiledModel:
    return gascompile.compile(model.eval(), "1MiB", example, machine=MACHINE, cache_dir=cache)


@pytest.mark.parametrize("has_example", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_calls_are_eagers_however_they_are_written(
    name: str, has_example: bool, tmp_path: Path
) -> None:
    model, x, by = MODELS[name](), torch.randn(2, 8), torch.randn(8)
    with (
        _compiled(model, tmp_path, (x, by) if has_example else None) as compiled,
        torch.no_grad(),
    ):
        for args, kwargs in (((x, by), {}), ((x,), {"by": by}), ((), {"x": x, "by": by})):
            # Others than the example's are of another kind, for which nothing was planned.
            if has_example and kwargs:
                continue
            torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))


def test_hooks_come_and_go(tmp_path: Path) -> None:
    model, x = Plain(), torch.randn(2, 8)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        handle = model.register_forward_pre_hook(_twice)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x=x), model(x=x))
        handle.remove()
        torch.testing.assert_close(compiled(x), model(x))


def _other_order(self: Plain, by: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.layer(x) * by
    return out


def test_a_forward_that_comes_later_sees_calls_as_they_are_written(tmp_path: Path) -> None:
    model: Any = Plain()
    x, own = torch.randn(2, 8), model.forward
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model.forward = lambda *args, **named: own(*(2 * value for value in args), **named)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x=x), model(x=x))
        del model.forward
        torch.testing.assert_close(compiled(x), model(x))


def test_the_forward_of_a_class_may_be_another_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, by = Plain(), torch.randn(2, 8), torch.randn(2, 8)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        torch.testing.assert_close(compiled(x, by), model(x, by))
        monkeypatch.setattr(Plain, "forward", _other_order)
        torch.testing.assert_close(compiled(by, x), model(by, x))
        monkeypatch.setattr(Plain, "forward", _doubled(_other_order))
        torch.testing.assert_close(compiled(by, x), model(by, x))


def _scaled(by: float, x: torch.Tensor) -> torch.Tensor:
    return x * by


class Partial(nn.Module):
    """Its forward is no function, and gets no model."""

    forward = functools.partial(_scaled, 2.0)


def test_forwards_that_are_no_functions(tmp_path: Path) -> None:
    model, x = Plain(), torch.randn(2, 8)
    with _compiled(Partial(), tmp_path) as compiled:
        assert torch.equal(compiled(x), 2 * x)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        vars(model)["forward"] = torch.relu
        with pytest.raises(CaptureError, match="no signature found"):
            compiled(x)


def test_sizes_vary_with_a_forward_that_comes_later(tmp_path: Path) -> None:
    model = Plain()
    own = model.forward
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        compiled(torch.randn(2, 8))
        vars(model)["forward"] = lambda *args: own(*(2 * value for value in args))
        for count in (2, 5, 9, 3, 7):
            x = torch.randn(count, 8)
            torch.testing.assert_close(compiled(x), model(x))
        assert len(compiled._gascompile.units) < 5


def test_a_forward_that_leads_to_the_compiled_model_has_the_names_of_its_own(
    tmp_path: Path,
) -> None:
    model: Any = Plain()
    x, by = torch.randn(2, 8), torch.randn(8)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        wanted = model(x, by)
        model.forward = functools.partial(compiled)
        for args, kwargs in (((x, by), {}), ((x,), {"by": by}), ((), {"x": x, "by": by})):
            torch.testing.assert_close(model(*args, **kwargs), wanted)
        assert len(compiled._gascompile.units) == 1


def test_sizes_vary_without_names(tmp_path: Path) -> None:
    model = MODELS["before"]()
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        for count in (2, 5, 9, 3, 7):
            x = torch.randn(count, 8)
            torch.testing.assert_close(compiled(x), model(x))
        assert len(compiled._gascompile.units) < 5


def test_a_bundle_takes_calls_as_they_were_written(tmp_path: Path) -> None:
    model, x = MODELS["before"](), torch.randn(2, 8)
    with _compiled(model, tmp_path / "cache", (x,)) as compiled, torch.no_grad():
        compiled.save(tmp_path / "saved")
        wanted = model(x)
    with gascompile.load(tmp_path / "saved", any_machine=True, cache_dir=tmp_path) as loaded:
        torch.testing.assert_close(loaded(x), wanted)


def test_plain_models_have_one_plan_for_all_ways(tmp_path: Path) -> None:
    model, x, by = Plain(), torch.randn(2, 8), torch.randn(8)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        for args, kwargs in (((x, by), {}), ((x,), {"by": by}), ((), {"by": by, "x": x})):
            torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))
        assert len(compiled._gascompile.units) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what its compiler imports
def test_what_torch_compile_returns_is_captured_as_it_was_written(tmp_path: Path) -> None:
    model, x = MODELS["before"](), torch.randn(2, 8)
    faster: Any = torch.compile(model)
    with _compiled(faster, tmp_path, (x,)) as compiled, torch.no_grad():
        assert isinstance(compiled, Plain)
        torch.testing.assert_close(compiled(x), model(x))
