"""Evaluation under the budget: eager's loss, and not a bit of the run changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile import compile_step
from gascompile.core.errors import CaptureError, InfeasiblePlanError
from tests.training.runs import (
    BUDGET_BYTES,
    MACHINE,
    adamw,
    batches,
    compiled,
    loss_fn,
    new_model,
    plain_losses,
    plain_step,
)


def eager_loss(model: torch.nn.Module, batch: torch.Tensor) -> float:
    """Return the loss in evaluation mode; leave the model in training mode."""
    model.eval()
    with torch.no_grad():
        found = float(loss_fn(model, batch))
    model.train()
    return found


@pytest.mark.parametrize("budget", [BUDGET_BYTES, "64MiB"])
def test_evaluations_between_steps_equal_eager(budget: int | str, tmp_path: Path) -> None:
    reference = new_model().train()
    reference_optimizer = adamw(reference)
    held_out = batches(4, rows=6)[3]
    expected = []
    torch.manual_seed(5)
    for batch in batches(3):
        expected += [plain_step(reference, reference_optimizer, batch)]
        expected += [eager_loss(reference, held_out)]
    model = new_model().train()
    found = []
    with compiled(model, adamw(model), tmp_path, budget=budget) as step:
        torch.manual_seed(5)
        for batch in batches(3):
            found += [float(step(batch)), float(step.eval(held_out))]
            assert step.last_run is not None
            limit = 64 << 20 if isinstance(budget, str) else budget
            assert step.last_run.peak_bytes["cpu"] <= limit - (4 << 20)
        assert model.training
        assert step.num_steps == 3
    assert found == expected


def test_an_evaluation_may_come_first_and_keeps_modes(tmp_path: Path) -> None:
    model = new_model().train()
    model.norm.eval()  # as for frozen statistics: modes are kept per module
    reference = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        assert float(step.eval(batches(1)[0])) == eager_loss(reference, batches(1)[0])
        assert model.training
        assert not model.norm.training
        assert model.blocks[0].training
        model.norm.train()
        torch.manual_seed(5)
        assert [float(step(batch)) for batch in batches(2)] == plain_losses(2)


def test_evaluating_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        torch.manual_seed(5)
        losses = []
        for batch in batches(3):
            before = step.state_dict()
            step.eval(batch)
            after = step.state_dict()
            for name, value in before["model"].items():
                assert torch.equal(after["model"][name], value), name
            losses.append(float(step(batch)))
    assert losses == plain_losses(3)


@pytest.mark.parametrize("first", [True, False])
def test_evaluations_need_no_gradient(first: bool, tmp_path: Path) -> None:
    """The number of right answers, which is no float, and a loss without a graph."""

    def counting(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training:
            return loss_fn(model, batch)
        with torch.no_grad():
            guesses = model(batch[:, :-1]).argmax(1)
        right: torch.Tensor = (guesses == batch[:, 1:].flatten()).sum()
        return right

    reference = new_model().train()
    reference_optimizer = adamw(reference)
    model = new_model().train()
    held_out = batches(4, rows=6)[3]
    with compile_step(
        model, counting, adamw(model), "64MiB", machine=MACHINE, cache_dir=tmp_path
    ) as step:
        torch.manual_seed(5)
        if first:
            right = step.eval(held_out)
            assert right.dtype == torch.int64
            assert right == counting(reference.eval(), held_out)
            reference.train()
        found = []
        for batch in batches(3):
            found += [float(step(batch)), int(step.eval(held_out))]
        torch.manual_seed(5)
        for number, batch in enumerate(batches(3)):
            assert found[2 * number] == plain_step(reference, reference_optimizer, batch)
            assert found[2 * number + 1] == counting(reference.eval(), held_out)
            reference.train()
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())


def test_evaluations_of_more_than_one_value_are_refused(tmp_path: Path) -> None:
    def scores(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        guesses: torch.Tensor = model(batch).argmax(1)
        return loss_fn(model, batch) if model.training else guesses

    model = new_model().train()
    with compile_step(
        model, scores, adamw(model), "64MiB", batches(1)[0], machine=MACHINE, cache_dir=tmp_path
    ) as step:
        with pytest.raises(CaptureError, match="scalar"):
            step.eval(batches(1)[0])
        step(batches(1)[0])


def test_plans_of_evaluations_move_tensors_whole_however_little_time_there_is_to_plan(
    tmp_path: Path,
) -> None:
    model, (batch,) = new_model().train(), batches(1, rows=16)
    kwargs: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path, "time_limit_s": 1e-4}
    with pytest.raises(InfeasiblePlanError) as refused:
        compile_step(model, loss_fn, adamw(model), 1, batch, **kwargs)
    budget = int(1.1 * refused.value.required_bytes)
    wanted = eager_loss(model, batch)
    with compile_step(model, loss_fn, adamw(model), budget, batch, **kwargs) as step:
        assert float(step.eval(batch)) == wanted
