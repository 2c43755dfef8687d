"""Rank loss: this rank's share of the loss over all ranks' rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gascompile.training.capture.counted_losses import CountedLosses
from gascompile.training.capture.synchronised_norm import SynchronisedNorm
from gascompile.training.capture.traced_loss import LossFunction


class RankLoss:
    """A loss that is a mean over rows, weighted by the rank's rows among those of all ranks.

    Of cross entropies the targets that are not ignored are weighed instead; see ``CountedLosses``.
    The sum over the ranks is the mean over all rows, and so is that of the gradients, however rows are divided.
    What is no floating-point number, such as a count of right answers, is summed as it is.
    """

    def __init__(self, loss_fn: LossFunction, num_ranks: int) -> None:
        """Begin with equal rows."""
        self.loss_fn = loss_fn
        self.weight = torch.full((), 1 / num_ranks)
        """Read by every step, as are other tensors from outside the model."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the weighted loss."""
        with SynchronisedNorm(), CountedLosses(self.weight):
            loss = self.loss_fn(model, batch)
        return loss * self.weight.to(loss.dtype) if loss.is_floating_point() else loss
