"""Values that code reads in ways other than by an attribute's or a global's name in an instruction."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile import compile_step
from tests.training.trials import MACHINE

X = torch.ones(2, 3)
settings = types.ModuleType("settings_of_a_test")
sys.modules[settings.__name__] = settings
exec("def function(): pass", vars(settings))


@dataclass
class Config:
    """What is matched."""

    strength: float = 1.0


config = Config()


def by_dict() -> Any:
    return settings.__dict__["strength"]


def by_get() -> Any:
    return settings.__dict__.get("strength", 1.0)


def by_import() -> Any:
    return __import__("settings_of_a_test").strength


def by_import_module() -> Any:
    return importlib.import_module("settings_of_a_test").strength


def by_modules() -> Any:
    return sys.modules["settings_of_a_test"].strength


def by_globals() -> Any:
    return settings.function.__globals__["strength"]


def by_pattern() -> Any:
    match config:
        case Config(strength=value):
            return value


def by_place() -> Any:
    match config:
        case Config(value):
            return value


def by_format() -> Any:
    text = "{.strength}"
    return float(text.format(config))


def by_members() -> Any:
    return dict(inspect.getmembers(config))["strength"]


def by_static() -> Any:
    return inspect.getattr_static(config, "strength")


def by_state() -> Any:
    return config.__getstate__()["strength"]  # type: ignore[index]


def by_reduce() -> Any:
    return config.__reduce_ex__(2)[2]["strength"]  # type: ignore[index]


WAYS: list[Callable[[], Any]] = [
    by_dict, by_get, by_import, by_import_module, by_modules, by_globals, by_pattern, by_place, by_format, by_members,
    by_static, by_state, by_reduce,
]  # fmt: skip


class Scaled(nn.Module):
    """A layer times a number, read in some way."""

    def __init__(self, way: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 3), way

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.way()


def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def _set(value: float) -> None:
    config.strength = value
    settings.strength = value  # type: ignore[attr-defined]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_each_call(
    way: Callable[[], Any], trains: bool, tmp_path: Path
) -> None:
    """Of an open plan, and of one that is kept and found again."""
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    for first in (1.0, 2.0):
        torch.manual_seed(0)
        model = Scaled(way).train(trains)
        weights = [value.detach().clone() for value in model.layer.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _set(first)
        planned: Any = (
            compile_step(model, loss_fn, optimizer, "8MiB", X, **options)
            if trains
            else gascompile.compile(model, "8MiB", (X,), **options)
        )
        with planned:
            for value in (first, 5.0):
                _set(value)
                expected = nn.functional.linear(X, *weights) * value
                wanted = expected.square().mean() if trains else expected
                torch.testing.assert_close(planned(X).detach(), wanted)
