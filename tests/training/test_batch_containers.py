"""Containers of batches that have more than their entries: the loss gets it, or an error says what to pass."""

from __future__ import annotations

import enum
import re
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

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
    ],
    ids=["named tuple", "ordered dict", "output of a model", "default dict", "keys"],
)
def test_entries_are_all_there(batch: Any, read: Any, tmp_path: Path) -> None:
    assert loss_of(batch, read, tmp_path) == pytest.approx(
        loss_of(batch, lambda b: (X, 2.0), tmp_path)
    )


def test_keys_and_factories_that_no_plan_compares_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=re.escape("a dict with a key of ") + ".*Key"):
        loss_of({Key("x"): X}, lambda b: (b["x"], 1.0), tmp_path)
    with pytest.raises(CaptureError, match="a defaultdict whose factory is a function"):
        loss_of(defaultdict(lambda: 2.0, x=X), lambda b: (b["x"], b["scale"]), tmp_path)
