"""Fake tensors that a model's code can reach: they have no values to be told apart by, and end no capture."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.capture.fingerprint.fingerprint import module_print


class Reaching(nn.Module):
    """A model whose forward can see what is in a list."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.forward = functools.partial(self._with, seen)

    def _with(self, seen: list[Any], x: torch.Tensor) -> torch.Tensor:
        return x * len(seen)


def test_fakes_are_told_apart_by_shape_alone() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = [torch.randn(3), nn.Parameter(torch.randn(2, 4)), torch.randn(3)]
    fakes = [mode.from_tensor(x) for x in real]
    prints = [module_print(Reaching([fake, mode])).digest for fake in fakes]
    assert prints[0] == prints[2] != prints[1]
