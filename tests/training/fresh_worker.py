"""A process that plans several small models, and has imported nothing of what plans before.

Prints the digits of what comes out, and what has been imported to capture or plan for it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gascompile

MAKES_PLANS = ("gascompile.training.capture.joint", "gascompile.capture.export", "pulp", "highspy")
_library = torch.library.Library("fresh_worker", "DEF")
_library.define("twice(Tensor values) -> Tensor")


def _twice(values: torch.Tensor) -> torch.Tensor:
    return values * 2


_library.impl("twice", _twice, "CompositeImplicitAutograd")


class Plain(nn.Module):
    """A layer, and what is made of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.after(functional.gelu(self.linear(values)))

    def after(self, values: torch.Tensor) -> torch.Tensor:
        return values


class OwnOp(Plain):
    def after(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.fresh_worker.twice(values)
        return found


class Mapped(Plain):
    def after(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(lambda row: row * row.sum())(values)
        return found


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def after(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(values)
        return found


class Drops(Plain):
    def after(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values, 0.5, self.training)


class Checkpoints(Plain):
    def after(self, values: torch.Tensor) -> torch.Tensor:
        found: Any = checkpoint(self.linear, values, use_reentrant=False)
        return found  # type: ignore[no-any-return]


_KINDS = (Plain, OwnOp, Counts, Drops, Checkpoints)
_TRAINED = (*_KINDS, Mapped)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def _trains(kind: type[nn.Module], cache: str) -> list[str]:
    torch.manual_seed(0)
    model, values = kind(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile_step(
        model, _loss, optimizer, "64MiB", machine="cpu-nvme", cache_dir=cache
    ) as step:
        return [float(step(values)).hex() for _ in range(2)]


def _computes(kind: type[nn.Module], cache: str) -> list[str]:
    torch.manual_seed(0)
    model, values = kind().eval(), torch.randn(4, 8)
    with gascompile.compile(
        model, "64MiB", example_inputs=(values,), machine="cpu-nvme", cache_dir=cache
    ) as compiled:
        found: torch.Tensor = compiled(values)
        return [x.hex() for x in found.flatten().tolist()]


def main() -> None:
    """Train models and compute them with the cache of the command line; ranks train one."""
    (cache,) = sys.argv[1:]
    if "RANK" in os.environ:
        found = {"Drops": _trains(Drops, cache)}
    else:
        found = {f"{kind.__name__} trains": _trains(kind, cache) for kind in _TRAINED}
        found |= {f"{kind.__name__} computes": _computes(kind, cache) for kind in _KINDS}
    made = sorted(sys.modules.keys() & {*MAKES_PLANS})
    sys.stdout.write(json.dumps({"found": found, "made": made}) + "\n")


if __name__ == "__main__":
    main()
