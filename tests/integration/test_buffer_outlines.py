"""What forward asks of buffers and parameters besides their values: another answer is another plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.outlines import ModelOutlines
from gascompile.core.errors import PlanMismatchError

_BUDGET = "8MiB"
_X = torch.arange(32.0).reshape(2, 16) / 32
Asks = Callable[[Any, torch.Tensor], Any]
Edit = Callable[[Any], object]


class _Asking(nn.Module):
    def __init__(self, asks: Asks, buffers: dict[str, torch.Tensor | None]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.asks = asks
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.asks(self, self.linear(x))


def _set(value: Callable[[], Any], name: str = "sc") -> Edit:
    return lambda m: setattr(m, name, value())


def _as_parameter(model: Any) -> None:
    del model.sc
    model.sc = nn.Parameter(torch.ones(3))


def _by_shape(m: Any, y: torch.Tensor) -> Any:
    return y * m.sc.shape[0]


def _by_dtype(m: Any, y: torch.Tensor) -> Any:
    return y.to(m.sc.dtype)


def _by_none(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if m.sc is None else 3)


def _by_stride(m: Any, y: torch.Tensor) -> Any:
    return y * m.sc.stride(0)


def _by_gradient(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if m.sc.requires_grad else 3)


def _by_class(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if isinstance(m.sc, nn.Parameter) else 3)


def _by_attribute(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if hasattr(m, "zz") else 3)


def _by_identity(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if m.sc is m.other else 3)


def _by_buffers(m: Any, y: torch.Tensor) -> Any:
    return y * (1 + len(list(m.buffers())))


def _by_parameters(m: Any, y: torch.Tensor) -> Any:
    return y * sum(p.numel() for p in m.parameters())


def _by_names(m: Any, y: torch.Tensor) -> Any:
    return y * (2 if "zz" in dict(m.named_buffers()) else 3)


def _by_parameter_names(m: Any, y: torch.Tensor) -> Any:
    return y * len(dict(m.named_parameters()))


def _by_state(m: Any, y: torch.Tensor) -> Any:
    return y * len(m.state_dict())


def _by_values(m: Any, y: torch.Tensor) -> Any:
    return y + sum(b.sum() for b in m.buffers())


def _buffer(m: Any) -> None:
    m.register_buffer("zz", torch.ones(5))


def _parameter(m: Any) -> None:
    m.register_parameter("zz", nn.Parameter(torch.ones(5)))


_EDITS: dict[str, tuple[Asks, Edit]] = {
    "shape": (_by_shape, _set(lambda: torch.ones(5, 3))),
    "shape by data": (_by_shape, lambda m: setattr(m.sc, "data", torch.ones(9, 3))),
    "same memory": (_by_shape, lambda m: setattr(m.sc, "data", m.sc.data.view(9))),
    "resize": (_by_shape, lambda m: m.sc.resize_(2, 3)),
    "set": (_by_shape, lambda m: m.sc.set_(torch.ones(7))),
    "dtype": (_by_dtype, _set(lambda: torch.ones(3, 3, dtype=torch.float64))),
    "dtype by double": (_by_dtype, lambda m: m._buffers.update(sc=m.sc.double())),
    "dtype by data": (_by_dtype, lambda m: setattr(m.sc, "data", m.sc.data.double())),
    "to none": (_by_none, _set(lambda: None)),
    "stride": (_by_stride, _set(lambda: torch.arange(9.0).reshape(3, 3).t())),
    "stride in place": (_by_stride, lambda m: m.sc.t_()),
    "gradient": (_by_gradient, lambda m: m.sc.requires_grad_()),
    "class": (_by_class, _as_parameter),
    "buffer is there": (_by_attribute, _buffer),
    "parameter is there": (_by_attribute, _parameter),
    "identity": (_by_identity, _set(lambda: torch.ones(3, 3), "other")),
    "number of buffers": (_by_buffers, _buffer),
    "other dictionary": (_by_buffers, lambda m: m.__dict__.update(_buffers={})),
    "number of parameters": (_by_parameters, _parameter),
    "names": (_by_names, _buffer),
    "names of parameters": (_by_parameter_names, _parameter),
    "state": (_by_state, _buffer),
    "not in the state": (_by_state, lambda m: m._non_persistent_buffers_set.add("sc")),
    "values of another": (_by_values, _buffer),
}  # fmt: skip


def _model(asks: Asks) -> _Asking:
    torch.manual_seed(0)
    shared = torch.arange(9.0).reshape(3, 3)
    return _Asking(asks, {"sc": shared, "other": shared})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GASCOMPILE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("edit", _EDITS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_edits_are_seen(edit: str, mode: Any, tmp_path: Path) -> None:
    asks, change = _EDITS[edit]
    eager, model = _model(asks), _model(asks)
    with mode(), gascompile.compile(model, _BUDGET, (_X,)) as compiled:
        torch.testing.assert_close(compiled(_X), eager(_X))
        first = eager(_X)
        with torch.inference_mode(False), torch.no_grad():
            change(eager)
            change(model)
        with pytest.raises(PlanMismatchError):
            compiled.save(tmp_path / "bundle")
        # Still so when asked again.
        with pytest.raises(PlanMismatchError):
            compiled.save(tmp_path / "bundle")
        result = compiled(_X)
        torch.testing.assert_close(result, eager(_X))
        assert result.dtype != first.dtype or not torch.equal(result, first)
        plan = compiled.plan
        torch.testing.assert_close(compiled(_X), eager(_X))
        assert compiled.plan is plan


def test_one_object_again() -> None:
    eager, model = _model(_by_identity), _model(_by_identity)
    with torch.no_grad(), gascompile.compile(model, _BUDGET, (_X,)) as compiled:
        for edit in (_set(lambda: torch.ones(3, 3), "other"), lambda m: setattr(m, "other", m.sc)):
            edit(eager)
            edit(model)
            torch.testing.assert_close(compiled(_X), eager(_X))


@pytest.mark.parametrize(
    "edit",
    [
        _set(lambda: torch.zeros(3, 3)),
        lambda m: m.sc.zero_(),
        lambda m: setattr(m.sc, "data", torch.zeros(3, 3)),
        lambda m: m._buffers.update(sc=m.sc),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
    ],
)
def test_other_values_are_no_other_outline(edit: Edit) -> None:
    model = _Asking(_by_shape, {"sc": torch.ones(3, 3)})
    known = ModelOutlines(model)
    edit(model)
    assert known.changed() is None
    assert known._is_as_taken()


def test_modes_are_no_other_outline() -> None:
    model = _model(_by_shape)
    known = ModelOutlines(model)
    with torch.inference_mode():
        assert known._is_as_taken()
    with torch.no_grad():
        assert known._is_as_taken()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert known.changed() is None
    assert known.changed() is None
    model.to("meta")
    assert known.changed() is None
    assert known._is_as_taken()


def test_statistics_plan_nothing_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).train()
    with torch.no_grad(), gascompile.compile(model, _BUDGET, (_X,)) as compiled:
        compiled(_X)
        plan = compiled.plan
        for _ in range(3):
            compiled(_X)
            assert compiled.plan is plan


def test_a_buffer_that_wants_gradients_when_compiled() -> None:
    for wants in (False, True):
        model = _model(_by_gradient)
        model.sc.requires_grad_(wants)
        with torch.no_grad(), gascompile.compile(model, _BUDGET, (_X,)) as compiled:
            torch.testing.assert_close(compiled(_X), model(_X))


@pytest.mark.parametrize("seed", [torch.initial_seed, torch.default_generator.initial_seed])
def test_the_seed_is_seen(seed: Callable[[], int]) -> None:
    model = _model(lambda _, y: y * (seed() % 7))
    with torch.no_grad(), gascompile.compile(model, _BUDGET, (_X,)) as compiled:
        for number in (3, 4, 4, 3):
            torch.manual_seed(number)
            torch.testing.assert_close(compiled(_X), model(_X))
