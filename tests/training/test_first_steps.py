"""First steps, and what is left where no update has followed them: no count has it, and nobody loses it unseen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile import StorageError
from gascompile.training.unit import StepUnit
from tests.training.runs import adamw, batches, compiled, loss_fn, losses, new_model


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("by_file", [True, False])
def test_nothing_is_left_of_a_first_step_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, by_file: bool
) -> None:
    """It has written moments and totals, and no count says so."""

    def interrupted(*given: Any, **options: Any) -> Any:
        run(*given, **options)
        raise KeyboardInterrupt

    run, model, folder = StepUnit.run, new_model().train(), tmp_path / "checkpoints"
    with compiled(model, adamw(model), tmp_path, accumulate=accumulate) as step:
        state = step.state_dict()
        torch.manual_seed(5)
        step.save(folder)
        with monkeypatch.context() as patch:
            patch.setattr(StepUnit, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(batches(1)[0])
        with pytest.raises(StorageError, match="half updated"):
            step(batches(1)[0])
        if by_file:
            step.load(folder)
        else:
            torch.manual_seed(5)
            step.load_state_dict(state)
        found = losses(step, 0, 4)
    assert found == _accumulated_losses(4, accumulate)


@pytest.mark.parametrize("number", [1, 2])
def test_gradients_that_no_update_has_used_are_not_dropped_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    model = new_model().train()
    step = compiled(model, adamw(model), tmp_path, accumulate=2)
    for batch in batches(number):
        step(batch)
    with caplog.at_level(logging.WARNING):
        step.close()
    told = caplog.text.count("added up since the last update, end with the step")
    assert told == number % 2


def _accumulated_losses(count: int, accumulate: int) -> list[float]:
    model = new_model().train()
    optimizer = adamw(model)
    torch.manual_seed(5)
    found = []
    for number, batch in enumerate(batches(count), 1):
        loss = loss_fn(model, batch)
        loss.backward()
        found.append(float(loss.detach()))
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found
