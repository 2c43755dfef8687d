"""Buffers that a forward pass assigns anew: as in eager, or refused where what is kept would be another value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError
from tests.training.runs import MACHINE

Next = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Assigning(nn.Module):
    """Assigns its buffer what is made of it and the input."""

    kept: torch.Tensor

    def __init__(self, first: torch.Tensor, made: Next) -> None:
        super().__init__()
        self.made = made
        self.register_buffer("kept", first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.made(self.kept, x)
        return self.kept.sum() + x


ANOTHER: dict[str, tuple[torch.Tensor, Next]] = {
    "grows from nothing": (torch.zeros(0, 8), lambda kept, x: torch.cat([kept, x])),
    "grows": (torch.zeros(1, 8), lambda kept, x: torch.cat([kept, x])),
    "whole number": (torch.tensor(0), lambda kept, x: 0.9 * kept + 0.1 * x.mean()),
    "flag": (torch.tensor(False), lambda kept, x: kept + x.sum()),
    "half": (torch.zeros(8).half(), lambda kept, x: kept.float() + x[0]),
    "sum": (torch.zeros(8), lambda kept, x: kept.sum() + x.sum()),
    "row": (torch.zeros(4, 8), lambda kept, x: kept[:1] + x),
}


def _compiled(model: nn.Module, cache: Path) -> gascompile.CompiledModel:
    x = torch.randn(1, 8)
    return gascompile.compile(model.eval(), "1MiB", (x,), machine=MACHINE, cache_dir=cache)


@pytest.mark.parametrize("name", ANOTHER)
def test_another_type_or_shape_is_refused(name: str, tmp_path: Path) -> None:
    model = Assigning(*ANOTHER[name])
    before = model.kept.clone()
    with pytest.raises(CaptureError, match=r"assigns its buffer 'kept' a value of .*by copy_"):
        _compiled(model, tmp_path)
    assert model.kept.dtype is before.dtype
    assert torch.equal(model.kept, before)


@pytest.mark.parametrize("first", [torch.zeros(8), torch.zeros(1, 8), torch.zeros(1, 8).double()])
def test_a_value_like_the_one_before_is_kept(first: torch.Tensor, tmp_path: Path) -> None:
    model = Assigning(first, lambda kept, x: 0.5 * kept + x.to(kept.dtype).reshape(kept.shape))
    eager = copy.deepcopy(model)
    with _compiled(model, tmp_path) as compiled, torch.no_grad():
        for x in torch.randn(3, 1, 8):
            torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(model.kept, eager.kept)
