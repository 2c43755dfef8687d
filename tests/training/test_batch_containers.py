"""Containers of batches that have more than their entries: the loss gets it, or an error says what to pass."""

from __future__ import annotations

import copy
import enum
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from gascompile import compile_step
from gascompile.core.errors import CaptureError

X = torch.ones(2, 8)


class Named(NamedTuple):
    """Has fields."""

    x: torch.Tensor
    scale: float = 1.0


class MoreNamed(Named):
    """May have attributes, too."""


class Found(Named):
    """Has found something out."""

    @cached_property
    def total(self) -> float:
        return float(self.x.sum())


def found() -> Found:
    batch = Found(X, 2.0)
    assert batch.total
    return batch


class Key(str):
    """A text that may have more to it."""

    __slots__ = ("language",)


class Task(enum.Enum):
    """Is a key."""

    FIRST = 1


def loss_of(batch: Any, read: Any, folder: Path) -> float:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, scale = read(batch)
        value: torch.Tensor = model(x).square().mean() * scale
        return value

    expected = float(loss_fn(model, batch).detach())
    with compile_step(model, loss_fn, optimizer, cache_dir=folder) as step:
        assert float(step(batch)) == expected
    return expected


def with_attribute(batch: Any) -> Any:
    batch.gain = 2.0
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        with_attribute(MoreNamed(X)),
        with_attribute(CausalLMOutput(logits=X)),
        [{"inner": with_attribute(CausalLMOutput(logits=X))}],
    ],
    ids=["named tuple", "output of a model", "inside"],
)
def test_attributes_that_would_be_lost_are_refused(batch: Any, tmp_path: Path) -> None:
    def read(batch: Any) -> Any:
        inner = batch[0]["inner"] if isinstance(batch, list) else batch
        return X, getattr(inner, "gain", 1.0)

    with pytest.raises(CaptureError, match="an attribute 'gain' beside its entries"):
        loss_of(batch, read, tmp_path)


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (MoreNamed(X, 2.0), lambda b: (b.x, b.scale)),
        (OrderedDict(x=X, scale=2.0), lambda b: (b["x"], b["scale"])),
        (CausalLMOutput(logits=X), lambda b: (b.logits, 2.0 if b.loss is None else 1.0)),
        (defaultdict(list, x=X, scale=2.0), lambda b: (b["x"], b["scale"] + len(b["none"]))),
        ({Task.FIRST: X, (1, "b"): 2.0}, lambda b: (b[Task.FIRST], b[1, "b"])),
        (
            {np.int64(1): X, np.str_("a"): 2.0, (Task.FIRST, 1): 1.0, frozenset({1}): 1, int: 1},
            lambda b: (b[1], b["a"] * b[Task.FIRST, 1]),
        ),
        (found(), lambda b: (b.x, b.scale)),
        (defaultdict[str, Any](lambda: 2.0, x=X), lambda b: (b["x"], b["scale"])),
    ],
    ids=[
        "named tuple",
        "ordered dict",
        "output of a model",
        "default dict",
        "keys",
        "other keys",
        "found",
        "factory",
    ],
)
def test_entries_are_all_there(batch: Any, read: Any, tmp_path: Path) -> None:
    assert loss_of(batch, read, tmp_path) == pytest.approx(
        loss_of(batch, lambda b: (X, 2.0), tmp_path)
    )


@pytest.mark.parametrize("make", [dict, UserDict])
def test_keys_that_no_plan_compares_are_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=re.escape("a dict with a key of ") + ".*Key"):
        loss_of(make({Key("x"): X}), lambda b: (b["x"], 1.0), tmp_path)


class Settings:
    """Is made where an entry is missing."""

    scale = 1.0


class Box:
    """Has a value."""

    def __init__(self, value: float) -> None:
        self.value = value


def set_attribute(value: float) -> None:
    Task.FIRST.weight = Box(value)  # type: ignore[attr-defined]


def set_class(value: float) -> None:
    Settings.scale = value


CHANGES: dict[str, tuple[Callable[[float], None], Any, Callable[[Any], Any]]] = {
    "key": (set_attribute, {Task.FIRST: X}, lambda b: next(iter(b)).weight.value),
    "value": (set_attribute, {"x": X, "task": Task.FIRST}, lambda b: b["task"].weight.value),
    "global": (set_attribute, {"x": X}, lambda b: Task.FIRST.weight.value),  # type: ignore[attr-defined]
    "factory": (set_class, defaultdict(Settings, x=X), lambda b: b["none"].scale),
}


@pytest.mark.parametrize("case", CHANGES)
def test_attributes_of_members_and_factories_are_todays(case: str, tmp_path: Path) -> None:
    change, batch, read = CHANGES[case]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = model(X).square().mean() * read(batch)
        return value

    change(1.0)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):  # plans that were kept, too
        with compile_step(model, loss_fn, optimizer, cache_dir=tmp_path) as step:
            for value in (1.0, 2.0, 4.0):
                change(value)
                expected = float(loss_fn(model, copy.copy(batch)).detach())
                assert float(step(copy.copy(batch))) == expected


def test_classes_that_are_made_anew_alike_are_one_kind(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def batch_of(held: int) -> Any:
        @dataclass
        class Made:
            x: torch.Tensor

        Made.held = held  # type: ignore[attr-defined]
        pair: Any = namedtuple("pair", "made x")  # noqa: PYI024 - made as batches are
        return pair(Made(X), X)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = model(batch.made.x).square().mean()
        return value

    with compile_step(model, loss_fn, optimizer, cache_dir=tmp_path) as step:
        for number in range(20):
            step(batch_of(number % 2))
        assert len(list(step._units)) == 2
