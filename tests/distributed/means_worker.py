"""One rank of a job of two, whose losses count targets otherwise than rows; writes what came of it.

Run as ``tests.distributed.forked_ranks`` runs workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.core.errors import RankMismatchError
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE

ROWS = (3, 5)
"""Of each rank, where they are unequal."""
CLASSES = 6
NUM_STEPS = 3
Loss = Callable[[nn.Module, Any], torch.Tensor]
WEIGHTS = torch.linspace(0.1, 3.0, CLASSES)


class Dropped(nn.Module):
    """A layer and a dropout, the rate of which may be changed."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layer, self.drop, self.factor = nn.Linear(7, CLASSES), nn.Dropout(rate), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.drop(self.layer(x)) * self.factor
        return found


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def weighed(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS, label_smoothing=0.1)


def two_heads(model: nn.Module, batch: Any) -> torch.Tensor:
    """Whose losses count other targets each."""
    found = model(batch[0]).log_softmax(1)
    other = torch.where(batch[1] > 2, batch[1], 0)
    return functional.nll_loss(found, batch[1]) + 0.5 * functional.nll_loss(
        found, other, ignore_index=0
    )


def tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    """As language models are trained, on what comes next."""
    x, y = batch
    found = model(x)[:, None].expand(-1, 4, -1)
    targets = functional.pad(y[:, None] + torch.arange(4), (0, 1), value=-100)[:, 1:]
    targets = torch.where(targets < CLASSES, targets, -100)
    return functional.cross_entropy(found.reshape(-1, CLASSES), targets.reshape(-1))


@dataclass(frozen=True, slots=True)
class Counted:
    """A loss, how many of the first rows are ignored, and options of the step."""

    loss: Loss
    num_ignored: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, int]:
        return (4, 4) if self.options else ROWS

    def batches(self) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        count = sum(self.rows)
        made = []
        for _ in range(NUM_STEPS):
            targets = torch.randint(0, CLASSES, (count,), generator=generator)
            targets[: self.num_ignored] = -100
            made.append([torch.randn(count, 7, generator=generator), targets])
        return made


COUNTED = {
    "some ignored": Counted(entropy, 2),
    "all of a rank ignored": Counted(entropy, ROWS[0]),
    "equal rows": Counted(entropy, 3, {"rows": "equal"}),
    "class weights": Counted(weighed, 2),
    "two losses": Counted(two_heads, 2),
    "tokens": Counted(tokens),
}
CHANGED: dict[str, Callable[[Any], None]] = {
    "rate": lambda model: setattr(model.drop, "p", 0.5),
    "factor": lambda model: setattr(model, "factor", 2.0),
}
"""What one rank changes by itself."""


def made(rate: float = 0.0) -> tuple[Dropped, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Dropped(rate)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def trains(counted: Counted, rank: int, **options: Any) -> dict[str, Any]:
    model, optimizer = made()
    first = sum(counted.rows[:rank])
    own = slice(first, first + counted.rows[rank])
    batches = [[tensor[own] for tensor in batch] for batch in counted.batches()]
    with compile_step(model, counted.loss, optimizer, "64MiB", **options, **counted.options) as of:
        losses = [of(batch) for batch in batches]
        return {"losses": [*losses, of.eval(batches[0])], "model": of.state_dict()["model"]}


def differs(change: Callable[[Any], None], rows: tuple[int, int], rank: int, **options: Any) -> str:
    model, optimizer = made(0.2)
    batch = [torch.ones(rows[rank], 7), torch.zeros(rows[rank], dtype=torch.int64)]
    with compile_step(model, entropy, optimizer, "64MiB", **options) as step:
        step(batch)
        if rank == 1:
            change(model)
        try:
            step(batch)
        except RankMismatchError as error:
            return str(error)
    return ""


def main() -> None:
    """Do all of it, and write what was found."""
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    options = {
        "machine": MACHINE,
        "cache_dir": folder / f"cache-{rank}",
        "time_limit_s": PLANNING_S,
    }
    found: dict[str, Any] = {
        name: trains(counted, rank, **options) for name, counted in COUNTED.items()
    }
    for name, change in CHANGED.items():
        found[name] = differs(change, (4, 4), rank, **options)
    found["rate, other rows"] = differs(CHANGED["rate"], (2, 5), rank, **options)
    torch.save(found, folder / f"means.{rank}-of-2.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
