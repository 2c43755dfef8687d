"""What classes, functions, globals and containers get or lose between two calls: eager's results, whatever it is."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import gascompile

X = torch.arange(1.0, 9.0).reshape(2, 4) / 8


class Helper:
    """May get a scale."""


class Pieces(dict[str, Any]):
    """Gives entries as attributes, and raises what a dictionary does."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieces:
        return Pieces(self)


def offset(x: torch.Tensor) -> torch.Tensor:
    return x + float(getattr(offset, "by", 0.0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"a": 2.0, "b": 3.0}
        self.pieces: Any = Pieces(depth=2)
        self.plain = torch.ones(4)
        with torch.inference_mode():
            self.frozen = torch.ones(4)
        self.large = numpy.ones(300_000, dtype=numpy.float32)
        self.inner = nn.Sequential(nn.Tanh(), nn.Softplus())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(offset(x))
        for scale in self.scales.values():
            x = x * scale + 1
        x = x * getattr(self, "gain", 1.0) * getattr(Helper, "gain", 1.0) * self.pieces.depth
        x = x * getattr(sys.modules[__name__], "of_module", 1.0) + globals().get("of_all", 0.0)
        x = x * self.plain * self.frozen + float(self.large[-1])
        try:
            x = x * not_there  # type: ignore[name-defined]
        except NameError:
            x = x * pow(1.0, 2.0)
        return x

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Turned(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn(super().forward(x))


def reorder(entries: dict[str, Any]) -> None:
    first = next(iter(entries))
    entries[first] = entries.pop(first)


def write(tensor: torch.Tensor) -> None:
    tensor.data.fill_(5.0)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Any], object]] = {
    "class": lambda patch, _: patch.setattr(Layer, "gain", 3.0, raising=False),
    "helper": lambda patch, _: patch.setattr(Helper, "gain", 3.0, raising=False),
    "function": lambda patch, _: patch.setattr(offset, "by", 3.0, raising=False),
    "global": lambda patch, _: patch.setitem(globals(), "not_there", 3.0),
    "module": lambda patch, _: patch.setitem(globals(), "of_module", 3.0),
    "globals": lambda patch, _: patch.setitem(globals(), "of_all", 3.0),
    "shadow": lambda patch, _: patch.setitem(globals(), "pow", lambda *_: 3.0),
    "builtin": lambda patch, _: patch.setattr(builtins, "pow", lambda *_: 3.0),
    "method": lambda patch, _: patch.setattr(Turned, "turn", lambda _, x: 3 * x),
    "kind": lambda _, model: setattr(model, "__class__", Layer),
    "entries": lambda _, model: reorder(model.scales),
    "modules": lambda _, model: reorder(model.inner._modules),
    "memory": lambda _, model: write(model.plain),
    "tensor": lambda _, model: setattr(model.plain, "data", torch.full((4,), 5.0)),
    "array": lambda _, model: model.large.__setitem__(-1, 5.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    model = Turned().eval()
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        for _ in range(2):
            torch.testing.assert_close(compiled(X), before := model(X))
        assert "planned again" not in caplog.text
        CHANGES[change](monkeypatch, model)
        wanted = model(X)
        assert not torch.allclose(wanted, before)
        torch.testing.assert_close(compiled(X), wanted)


def test_writes_to_what_has_no_versions_count(tmp_path: Path) -> None:
    model = Layer().eval()
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(X), model(X))
        with torch.inference_mode():
            model.frozen.fill_(5.0)
        torch.testing.assert_close(compiled(X), model(X))


def test_a_parameter_that_is_gone_counts(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(X), model(X))
        model[0].register_parameter("bias", None)
        torch.testing.assert_close(compiled(X), model(X))
        nn.utils.parametrizations.weight_norm(model[1])
        torch.testing.assert_close(compiled(X), model(X))


class Worded(nn.Module):
    """Chooses a table by a size in words."""

    def __init__(self) -> None:
        super().__init__()
        self.table_8 = nn.Buffer(torch.full((4,), 8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = getattr(self, f"table_{x.shape[0]}", None)
        return x if table is None else x + table


class Typed(nn.Module):
    """Takes a size, or a pair of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size: Any = x.shape[0]
        pair = (size, 2 * size) if isinstance(size, int) else (size, size)
        return x + x.new_zeros(pair).shape[1]


class OfType(nn.Module):
    """Asks for the very type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.shape[0] if type(x.shape[0]) is int else 0)


@pytest.mark.parametrize("kind", [Worded, Typed, OfType])
def test_sizes_are_numbers_whatever_a_model_asks_of_them(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = kind()
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        for size in (4, 7, 8, 5, 16, 7):
            torch.testing.assert_close(compiled(torch.ones(size, 4)), model(torch.ones(size, 4)))
    shapes = ({0: torch.export.Dim("n", min=2, max=32)},)
    with pytest.raises(gascompile.CaptureError, match="size"):
        gascompile.compile(model, None, (torch.ones(7, 4),), dynamic_shapes=shapes)
