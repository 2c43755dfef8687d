"""The small network that the fault tests stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import gascompile

Build = Callable[[], gascompile.CompiledModel]
"""Compiles the network from its checkpoint."""


class Net(nn.Module):
    """Eight layers of 4 MiB: enough to stream, small enough to be quick."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        normed: torch.Tensor = self.norm(x)
        return normed


BUDGET = "16MiB"
