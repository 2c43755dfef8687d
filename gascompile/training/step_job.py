"""Step job: what the steps of a model are planned from, made once by ``compile_step`` and handed down whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.settings import Settings
from gascompile.training.state.file_values import FileValues
from gascompile.training.state.packed_values import PackedValue

if TYPE_CHECKING:
    from gascompile.training.saved_plans import SavedPlans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """Everything but the batches that the plans of a step are made from."""

    model: nn.Module
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer
    budget: Budget
    machine: Machine
    config: CompileConfig
    settings: Settings
    """As they were asked for; planning adds what it has found."""
    values: FileValues | None = None
    """Where the model's weights are in files."""
    saved: SavedPlans | None = None
    """The only plans there are to be."""

    @property
    def packed(self) -> Mapping[str, PackedValue]:
        """The values that stay in the codes of their files."""
        return self.values.packed if self.values is not None else {}

    @property
    def limit_bytes(self) -> int:
        """Bytes that the budget allows in the tier that computes."""
        return self.budget.limits_bytes(self.machine)[self.machine.compute_tier]
