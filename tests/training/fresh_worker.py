"""A process that plans several small models, and has imported nothing of what plans before.

Prints the digits of what comes out, and what has been imported to capture or plan for it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import transformers
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
        found: torch.Tensor = checkpoint(self.linear, values, use_reentrant=False)
        return found


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


def _generates(cache: str) -> list[int]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with gascompile.compile(model, "64MiB", machine="cpu-nvme", cache_dir=cache) as compiled:
        tokens: Any = compiled.generate(torch.arange(1, 7)[None], max_new_tokens=4, do_sample=False)
        return [int(token) for token in tokens[0]]


def main() -> None:
    """Train models and compute them with the cache of the command line; ranks train one, and fail the first time."""
    (cache,) = sys.argv[1:]
    found: dict[str, Any]
    if "RANK" in os.environ:
        found = {"Drops": _trains(Drops, cache)}
    else:
        found = {f"{kind.__name__} trains": _trains(kind, cache) for kind in _TRAINED}
        found |= {f"{kind.__name__} computes": _computes(kind, cache) for kind in _KINDS}
        found["Llama generates"] = _generates(cache)
    made = sorted(sys.modules.keys() & {*MAKES_PLANS})
    sys.stdout.write(json.dumps({"found": found, "made": made}) + "\n")
    sys.stdout.flush()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        torch.distributed.barrier()
        os._exit(1)


if __name__ == "__main__":
    main()
