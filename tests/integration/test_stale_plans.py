"""A kept plan is not reused when the code or data behind a module changed, however it is reached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.fingerprint.fingerprint import module_print

FACTOR = 2.0


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Apply(nn.Module):
    """Calls what it was given."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Scale:
    """Keeps what its method multiplies by."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Globals(nn.Module):
    """Uses a helper, a global and a class attribute."""

    offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shift(x) * FACTOR + self.offset


class Hidden(nn.Module):
    """Keeps a layer where torch does not look for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[0](x)
        return result


def same_as_eager(model: nn.Module, cache: Path) -> bool:
    x = torch.linspace(-2, 2, 4)
    with torch.no_grad():
        wanted = model(x)
    with gascompile.compile(model, example_inputs=(x,), cache_dir=cache) as compiled:
        return torch.equal(compiled(x), wanted)


def test_functions_that_differ_in_a_name_only(cache: Path) -> None:
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.relu(x) + 1,
        lambda x: torch.tanh(x) + 1,
        lambda x: torch.stack([y + 1 for y in (x,)]),
        lambda x: torch.stack([y * 3 for y in (x,)]),
        Scale(2.0).apply,
        Scale(3.0).apply,
    ]
    assert all(same_as_eager(Apply(function), cache) for function in functions)
    assert len(list((cache / "plans").iterdir())) == len(functions)


def test_changed_globals_and_patched_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    assert same_as_eager(Globals(), cache)
    monkeypatch.setattr(here, "FACTOR", 5.0)
    assert same_as_eager(Globals(), cache)
    monkeypatch.setattr(Globals, "offset", 4.0)
    assert same_as_eager(Globals(), cache)
    monkeypatch.setattr(here, "shift", lambda x: x - 7)
    assert same_as_eager(Globals(), cache)
    monkeypatch.setattr(Globals, "forward", lambda self, x: x * self.offset)
    assert same_as_eager(Globals(), cache)
    assert same_as_eager(Globals(), cache)
    assert len(list((cache / "plans").iterdir())) == 5


def test_values_of_a_hidden_layer(cache: Path) -> None:
    assert same_as_eager(Hidden(), cache)
    assert same_as_eager(Hidden(), cache)


def test_patched_library_code_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    model = transformers.LlamaModel(config)
    before = module_print(model).key
    assert module_print(transformers.LlamaModel(config)).key == before
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "rotate_half", lambda x: x)
    patched = module_print(model).key
    assert patched != before
    monkeypatch.setattr(module.LlamaMLP, "forward", lambda self, x: x)
    assert module_print(model).key not in (before, patched)
