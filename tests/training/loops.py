"""Training loops of many kinds, once in eager and once by planned steps: what both leave has to be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gascompile import compile_step
from gascompile.training.step import TrainingStep
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE

NUM_STEPS = 20


@dataclass(slots=True)
class Loop:
    """A run that is under way, in eager where it has no step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: TrainingStep | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    """What a case wants to keep between steps; compared in the end as far as it is tensors."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and what happens between steps."""

    name: str
    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batches: Callable[[int], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    change: Callable[[Loop, int], object] = lambda _loop, _number: None
    """Called before each step, with its number from zero on."""
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """What the error says to do, where the case is refused."""
    num_steps: int = NUM_STEPS


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses and all values in the end."""

    losses: Sequence[torch.Tensor]
    values: dict[str, torch.Tensor]


def eager(case: Case) -> Outcome:
    """Run a case as one would without a plan."""
    torch.manual_seed(1)
    model = case.model()
    loop = Loop(model, case.optimizer(model))
    every = case.options.get("accumulate", 1)
    limit = case.options.get("max_grad_norm")
    torch.manual_seed(7)
    losses = []
    for number in range(case.num_steps):
        case.change(loop, number)
        loss = case.loss_fn(model, case.batches(number))
        loss.backward()
        losses.append(loss.detach().clone())
        if (number + 1) % every:
            continue
        if limit is not None:
            trained = [p for group in loop.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, limit)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return _outcome(losses, loop)


def planned(case: Case, folder: Path) -> Outcome:
    """Run a case by planned steps."""
    torch.manual_seed(1)
    model = case.model()
    loop = Loop(model, case.optimizer(model))
    losses = []
    with compile_step(
        model,
        case.loss_fn,
        loop.optimizer,
        "64MiB",
        machine=MACHINE,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
        **case.options,
    ) as loop.step:
        torch.manual_seed(7)
        for number in range(case.num_steps):
            case.change(loop, number)
            losses.append(loop.step(case.batches(number)))
    return _outcome(losses, loop)


def _outcome(losses: Sequence[torch.Tensor], loop: Loop) -> Outcome:
    values = {name: value.clone() for name, value in loop.model.state_dict().items()}
    for index, entry in loop.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                values[f"{index}:{key}"] = value.clone()
    for key, value in loop.kept.items():
        if isinstance(value, nn.Module):
            own = value.state_dict()
            values.update({f"kept {key} {name}": copy.deepcopy(v) for name, v in own.items()})
    return Outcome(losses, values)
