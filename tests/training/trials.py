"""One training run by eager and by a planned step, and what the two have to have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.training.step import TrainingStep
from tests.training.runs import PLANNING_S

MACHINE = "cpu-nvme"
TRANSFER_BYTES = 4 * SPILL_BUFFER_BYTES
"""Of every budget, for transfers between memory and files."""
Loss = Callable[[nn.Module, Any], torch.Tensor]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer whose kernel the planned step runs, too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, its batches and all that its training takes."""

    model: nn.Module
    loss_fn: Loss
    batches: Sequence[Any]
    cache: Path
    optimizer: Optimizers = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    planning_s: float = PLANNING_S

    def eager(self) -> Result:
        """Train a copy as one would without a plan."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        limit = self.options.get("max_grad_norm")
        every = self.options.get("accumulate", 1)
        torch.manual_seed(7)
        losses = []
        for number, batch in enumerate(self.batches):
            loss = self.loss_fn(model, batch)
            loss.backward()
            losses.append(loss.detach().clone())
            if (number + 1) % every:
                continue
            if limit is not None:
                trained = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(trained, limit)
            optimizer.step()
            model.zero_grad()
            if scheduler:
                scheduler.step()
        return Result(losses, model.state_dict())

    def compiled(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, budget: int | None
    ) -> TrainingStep:
        """Return the planned step."""
        return compile_step(
            model,
            self.loss_fn,
            optimizer,
            budget,
            self.batches[0],
            machine=MACHINE,
            cache_dir=self.cache,
            time_limit_s=self.planning_s,
            **self.options,
        )

    def planned(self, budget: int | None = None) -> Result:
        """Train a copy by planned steps."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        every = self.options.get("accumulate", 1)
        losses, peaks = [], []
        with self.compiled(model, optimizer, budget) as step:
            torch.manual_seed(7)
            for number, batch in enumerate(self.batches):
                losses.append(step(batch))
                assert step.last_run is not None
                peaks.append(step.last_run.peak_bytes["cpu"])
                if scheduler and not (number + 1) % every:
                    scheduler.step()
            plan = step.plan
        return Result(losses, model.state_dict(), plan, max(peaks))

    def smallest_budget(self) -> int:
        """Return the smallest feasible budget, as the error for one that is too small names it."""
        model = copy.deepcopy(self.model)
        try:
            self.compiled(model, self.optimizer(model), 1)
        except InfeasiblePlanError as error:
            return error.required_bytes
        raise AssertionError("one byte was enough")


@dataclass(frozen=True, slots=True)
class Result:
    """What came out of a run."""

    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    plan: Plan | None = None
    peak_bytes: int = 0

    def assert_equals(self, other: Result) -> None:
        """Assert that losses, parameters and buffers have the same bits."""
        for number, (ours, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            assert torch.equal(ours, theirs), f"loss {number}: {ours} and {theirs}"
        assert self.state.keys() == other.state.keys()
        for name, value in self.state.items():
            assert torch.equal(value, other.state[name]), name

    def assert_close(self, other: Result, relative: float) -> None:
        """Assert that losses differ by ``relative`` at most, and so does the vector of all parameters.

        Element by element, or bias by bias, this cannot hold between two kernels of Adam: where a gradient is
        zero but for rounding, such as that of a bias before a normalisation, Adam divides the rounding error
        by its own size, and its sign makes a whole step.
        """
        for ours, theirs in zip(self.losses, other.losses, strict=True):
            assert abs(ours - theirs) <= relative * abs(theirs)
        ours_, theirs_ = (
            torch.cat([v.double().flatten() for v in found.state.values()])
            for found in (self, other)
        )
        assert (ours_ - theirs_).norm() <= relative * theirs_.norm()
