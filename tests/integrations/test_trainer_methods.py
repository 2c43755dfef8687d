"""Methods of a Trainer that others replace: followed as Trainer follows them, or refused."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.trainer import GasTrainer
from gascompile.training.capture import joint
from tests.integrations.test_trainer import BUDGET, SHORT, assert_same_weights, logged, made


class Alone(GasTrainer):
    """Makes gradients by itself."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss: Any = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Zeroing(GasTrainer):
    """Changes gradients before the update."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return loss


class Clipping(GasTrainer):
    """Clips in its own way."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        return loss


class Norm(GasTrainer):
    """Clips where Trainer does."""

    def _clip_grad_norm(self, model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)


class Flipped:
    """Turns batches around."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs["input_ids"] = inputs["input_ids"].flip(1)
        step: Any = super()
        return step.training_step(model, inputs, num_items_in_batch)


class FlippedTrainer(Flipped, Trainer):
    """As Trainer."""


class FlippedFirst(Flipped, GasTrainer):
    """As planned."""


class FlippedLast(GasTrainer, FlippedTrainer):
    """Its batches would be as they are."""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Alone, "no planned step has run since the last update"),
        (Zeroing, "uses 'grad'"),
        (Clipping, "uses 'clip_grad_norm_'"),
        (Norm, "_clip_grad_norm of Norm"),
        (FlippedLast, r"class FlippedLast\(Flipped, GasTrainer\)"),
    ],
)
def test_methods_that_a_planned_step_would_pass_by(
    kind: type[GasTrainer], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedOpError, match=said):
        made(kind, tmp_path, {**SHORT, "max_grad_norm": 1.0}, budget=BUDGET).train()


def assert_same_runs(kind: type[Trainer], planned: type[GasTrainer], folder: Path) -> None:
    """Train both, and compare what they log and what they make of the weights."""
    theirs = made(kind, folder / "theirs", {"optim": "sgd"})
    theirs.train()
    # Made afterwards: making one sets the seed.
    ours = made(planned, folder / "ours", {"optim": "sgd"}, budget=BUDGET)
    ours.train()
    assert logged(ours) == [pytest.approx(row, rel=1e-5) for row in logged(theirs)]
    assert_same_weights(ours.model, theirs.model)


def test_batches_that_a_method_changes(tmp_path: Path) -> None:
    assert_same_runs(FlippedTrainer, FlippedFirst, tmp_path)


def tripled(
    self: Any,
    model: nn.Module,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> Any:
    """Return three times the model's loss."""
    outputs = model(**inputs)
    loss = 3 * outputs.loss
    return (loss, outputs) if return_outputs else loss


def test_a_loss_that_is_put_in_the_librarys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "compute_loss", tripled)
    assert_same_runs(Trainer, GasTrainer, tmp_path)


def test_a_loss_of_one_trainer_is_refused(tmp_path: Path) -> None:
    trainer = made(GasTrainer, tmp_path, SHORT, budget=BUDGET)
    trainer.compute_loss = types.MethodType(tripled, trainer)
    with pytest.raises(UnsupportedOpError, match="define it in a subclass"):
        trainer.train()


class Halved(LabelSmoother):
    """A way of one's own to smooth."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        smoothed: Any = super().__call__
        return smoothed(*args, **options) / 2


@pytest.mark.parametrize("own", [False, True])
def test_smoothed_labels_are_captured_once(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's way to them asks what the model is wrapped in, which looks like asking for the trainer's state."""
    options = {**SHORT, "max_steps": 4, "label_smoothing_factor": 0.2, "eval_strategy": "no"}
    captured: list[int] = []
    captures = joint.capture_joint

    def counted(*args: Any, **options: Any) -> Any:
        captured.append(1)
        return captures(*args, **options)

    monkeypatch.setattr(joint, "capture_joint", counted)
    trained: list[Any] = []
    both: list[tuple[type[Trainer], dict[str, Any]]]
    both = [(Trainer, {}), (GasTrainer, {"budget": BUDGET})]
    for kind, budget in both:
        trainer = made(kind, tmp_path / kind.__name__, options, **budget)
        if own:
            trainer.label_smoother = Halved(epsilon=0.2)
        trainer.train()
        trained.append(trainer)
    expected, found = trained
    assert_same_weights(found.model, expected.model)
    for row, other in zip(logged(found), logged(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    assert own or len(captured) == 1


def test_another_smoother_while_it_trains_is_refused(tmp_path: Path) -> None:
    class Changes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.label_smoother.epsilon = 0.4

    options = {**SHORT, "label_smoothing_factor": 0.2, "eval_strategy": "no"}
    trainer = made(GasTrainer, tmp_path, options, budget=BUDGET, callbacks=[Changes()])
    with pytest.raises(UnsupportedOpError, match="label_smoother has changed"):
        trainer.train()
