"""Models with ops to fuse, and what equal results are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ALWAYS: dict[str, Any] = {"fuse_runs": math.inf}
"""Options that fuse whatever gains anything."""


class Gated(nn.Module):
    """Layers with a norm, a gate and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 256) for _ in range(4))
        self.norm = nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            a, b = layer(self.norm(x)).chunk(2, dim=-1)
            x = x + torch.tanh(a * 1.5 + 0.1) * torch.sigmoid(b)
        return x


class Corners(nn.Module):
    """What is easily lost in a fused kernel: roundings, overflows, writes through views, odd types and sizes."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(16))

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = (x.bfloat16() * 2 + x.bfloat16().tanh()).float() * x + 1
        overflown = (x.half() * 60000.0) * 2 / 3
        cast_twice = (x * 1.2345).half().float() - x * 1.2345
        whole = torch.where(n > 3, (n * 2**40 + 2**62) * 3, n.int() * 1000003) - (n >> 70)
        largest = (x * 2).max(1).indices + (x / 0).isnan().sum(1)
        infinite = torch.softmax((x * 2).masked_fill(x > -100, float("-inf")), 1) + 1
        written = (x * 2).tanh()
        left, right = written.chunk(2, 1)
        left.add_(right)
        dropped = nn.functional.dropout(torch.sin(written * 2) + x, 0.0, self.training)
        before = self.count * 2
        self.count.mul_(1.5)
        turned = torch.view_as_real(torch.complex(x, x * 2) * 2)
        none = torch.cat([x[:0] * 2, torch.tanh(x) * 2]) + (x[:, :0] * 3).sum()
        made = (mixed, overflown, cast_twice, whole, largest, infinite, left * right + 1, dropped)
        return *made, before + x, self.count * x + 1, turned * 2 + 1, none, x.t(), x, written


def assert_close(outputs: Any, expected: list[Any]) -> None:
    for value, wanted in zip(pytree.tree_leaves(outputs), expected, strict=True):
        if isinstance(wanted, torch.Tensor) and wanted.is_floating_point() and wanted.numel():
            scale = float(wanted.abs().max())
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5 * scale)
            assert value.stride() == wanted.stride()
        elif isinstance(wanted, torch.Tensor):
            assert torch.equal(value, wanted)
