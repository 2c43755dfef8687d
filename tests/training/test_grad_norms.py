"""Norms of gradients in the report of a step: those that torch's clipping returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.runs import adamw, batches, compiled, loss_fn, new_model

Make = Callable[[nn.Module], torch.optim.Optimizer]


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that can be left unplanned."""
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def eager_norms(make: Make, limit: float, every: int) -> list[float | None]:
    """Return what torch's clipping returns after each batch that has an update."""
    model = new_model().train()
    optimizer = make(model)
    torch.manual_seed(5)
    found: list[float | None] = []
    for number, batch in enumerate(batches(4)):
        loss_fn(model, batch).backward()
        if (number + 1) % every:
            found.append(None)
            continue
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {"max_grad_norm": 0.5}),
        (adamw, {"grad_norm": True}),
        (adamw, {"grad_norm": True, "accumulate": 2, "states": "8bit"}),
        (rmsprop, {"max_grad_norm": 0.5, "unplanned_optimizer": True}),
        (rmsprop, {"grad_norm": True, "unplanned_optimizer": True}),
    ],
    ids=["clipped", "asked_for", "accumulated", "unplanned", "unplanned_asked_for"],
)
def test_norms_are_those_before_clipping(
    make: Make, options: dict[str, Any], tmp_path: Path
) -> None:
    every = options.get("accumulate", 1)
    expected = eager_norms(make, options.get("max_grad_norm", float("inf")), every)
    model = new_model().train()
    found: list[float | None] = []
    with compiled(model, make(model), tmp_path, budget="64MiB", **options) as step:
        torch.manual_seed(5)
        for batch in batches(4):
            step(batch)
            assert step.last_run is not None
            found.append(step.last_run.grad_norm)
        step.eval(batches(1)[0])
        evaluated = step.last_run
        assert evaluated is not None
        assert evaluated.grad_norm is None
    # The first update is of the same parameters; later ones differ by what moments in 8 bits lose.
    close = 1e-5 if "states" not in options else 1e-2
    for number, (norm, other) in enumerate(zip(found, expected, strict=True)):
        if other is None:
            assert norm is None
        else:
            assert norm == pytest.approx(other, rel=1e-5 if number < every else close)
    assert any(norm is not None and norm > 0.5 for norm in found), "clipping changes something"


def test_norms_change_no_bit_of_a_step_and_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    losses = []
    for asked in (False, True):
        model = new_model().train()
        with compiled(model, adamw(model), tmp_path, grad_norm=asked) as step:
            torch.manual_seed(5)
            losses.append([float(step(batch)) for batch in batches(3)])
            assert step.last_run is not None
            assert (step.last_run.grad_norm is not None) is asked
    assert losses[0] == losses[1]
