"""Capture step: the program of a training step, of a model that may be far too large to be built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gascompile.capture.batches import admit
from gascompile.training.capture.joint import capture_joint
from gascompile.training.capture.requirements import require_followed
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.capture.unbacked_tensors import Outlines
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.planning.step_program import StepProgram, step_program
from gascompile.training.settings import Settings
from gascompile.training.state.aliasing import Storages, named_tensors


def capture_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    settings: Settings | None = None,
) -> StepProgram:
    """Return the program of a step that updates, for planning alone; the model stays as it is.

    Args:
        model: its tensors may be on the meta device.
        settings: what ``compile_step`` takes beside these; its defaults, if ``None``.

    Raises:
        CaptureError: the loss cannot be traced.
        UnsupportedOpError: the model or the optimizer is none that steps are made for.
    """
    require_followed(model, optimizer)
    admit(batch)
    _, tensors = named_tensors(model)
    missing = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    with Outlines(missing):
        storages = Storages(model)
        try:
            with storages.apart():
                joint = capture_joint(model, loss_fn, batch, storages, trains=True)
            names = {id(tensor): name for name, tensor in joint.tensors.items()}
            names.update((id(view.tensor), name) for name, view in storages.views.items())
            chosen = settings or Settings()
            rules = Rules(optimizer, names, list(joint.gradients), chosen.states)
            options = chosen.program(trains=True, updates=True)
            name = f"step of {type(model).__name__}"
            return step_program(joint, rules, name=name, options=options)
        finally:
            storages.restore()
