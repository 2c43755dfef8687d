"""A small model with everything that forms of weights tell apart."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """An embedding, layers with and without bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, 512)
        self.norm = nn.LayerNorm(512)
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512, bias=False)
        self.head = nn.Linear(512, 3000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        found: torch.Tensor = self.head(x)
        return found


def net() -> tuple[Net, torch.Tensor]:
    """Return the same model and inputs at every call."""
    torch.manual_seed(0)
    return Net().eval(), torch.randint(0, 3000, (2, 5))


def source() -> tuple[Net, tuple[torch.Tensor]]:
    """Return them as the command line takes them."""
    model, ids = net()
    return model, (ids,)
