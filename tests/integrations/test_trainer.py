"""transformers' Trainer with planned steps, against the Trainer itself: losses, weights, checkpoints, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import Adafactor, AdafactorSchedule

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.trainer import GasTrainer

transformers.utils.logging.disable_progress_bar()
BUDGET = "16MiB"
KEYS = ("loss", "eval_loss", "learning_rate", "step")


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of random words."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(0, 99, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": words, "labels": words} for words in found]


def small_model(dropout: float = 0.1) -> GPT2LMHeadModel:
    """Return the same GPT-2 at each call."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=99,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def made(
    kind: type[Trainer], folder: Path, options: dict[str, Any] | None = None, **own: Any
) -> Any:
    """Return a trainer; with eleven batches an epoch, whose last update is of two in place of three."""
    arguments: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "prediction_loss_only": True,
        "report_to": [],
        "disable_tqdm": True,
        **(options or {}),
    }
    torch.manual_seed(3)
    own = {"model": small_model(), **own}
    return kind(
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=samples(22),
        eval_dataset=samples(4),
        **own,
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what a trainer logged that does not depend on the time."""
    return [{key: row[key] for key in KEYS if key in row} for row in trainer.state.log_history]


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    """Compare bits."""
    values = expected.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_a_run_is_the_trainers(tmp_path: Path) -> None:
    """Accumulation with a shorter last update, a schedule, evaluations and checkpoints, with dropout; then resumed."""
    expected = made(Trainer, tmp_path / "eager")
    expected.train()
    found = made(GasTrainer, tmp_path / "planned", budget=BUDGET)
    found.train()
    assert logged(found) == logged(expected)
    assert any("eval_loss" in row for row in logged(found))
    assert_same_weights(found.model, expected.model)
    assert found.step is None
    batch = {name: value[None] for name, value in samples(1)[0].items()}
    loss = found.model(**batch)["loss"]
    assert loss.requires_grad, "the model is its own again"

    resumed = made(GasTrainer, tmp_path / "resumed", budget=BUDGET)
    resumed.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-3"))
    assert_same_weights(resumed.model, expected.model)
    by_eager = made(Trainer, tmp_path / "by_eager")
    by_eager.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-3"))
    assert_same_weights(by_eager.model, expected.model)


class Doubled(Trainer):
    """A user's trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return twice the model's loss."""
        found = super().compute_loss(model, inputs, *args, **options)
        return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2


class PlannedDoubled(GasTrainer, Doubled):
    """The same with planned steps."""


SHORT = {"max_steps": 2, "gradient_accumulation_steps": 1, "save_strategy": "no", "eval_steps": 2}


@pytest.mark.parametrize(
    ("kind", "planned", "options"),
    [
        (Doubled, PlannedDoubled, {}),
        (Trainer, GasTrainer, {"label_smoothing_factor": 0.1, "max_grad_norm": 0.5}),
    ],
    ids=["own_loss", "smoothed_and_clipped"],
)
def test_losses_are_the_trainers(
    kind: type[Trainer], planned: type[Trainer], options: dict[str, Any], tmp_path: Path
) -> None:
    """What computes a loss may be a method of the trainer, and gradients may be clipped."""
    expected = made(kind, tmp_path / "eager", {**SHORT, **options})
    expected.train()
    found = made(planned, tmp_path / "planned", {**SHORT, **options}, budget=BUDGET)
    found.train()
    for row, other in zip(logged(found), logged(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)
    norms, others = (
        [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        for trainer in (found, expected)
    )
    assert len(norms) == SHORT["max_steps"]
    assert norms == pytest.approx(others, rel=1e-5)
    for value, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)


class Weighed(Trainer):
    """Loss by what the trainer, its state and its arguments say at each batch."""

    weight = 1.0

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **options)
        weight = 3.0 if self.state.global_step > 1 else 1.0
        own: Any = self.args
        weight *= self.weight * own.own_weight * (1 + int(self.state.epoch or 0))
        return (found[0] * weight, found[1]) if isinstance(found, tuple) else found * weight


class PlannedWeighed(GasTrainer, Weighed):
    """The same, planned."""


class Weighing(TrainerCallback):
    """Changes what the loss is multiplied by."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.own_weight = 1.0 + state.global_step / 8
        self.trainer.weight = 2.0 if state.global_step == 3 else 1.0


def test_losses_follow_the_trainer_that_computes_them(tmp_path: Path) -> None:
    runs = []
    for kind, own in ((Weighed, {}), (PlannedWeighed, {"budget": BUDGET})):
        callback = Weighing()
        options = {"optim": "sgd", "learning_rate": 0.05}
        trainer = made(kind, tmp_path / kind.__name__, options, callbacks=[callback], **own)
        callback.trainer, trainer.args.own_weight = trainer, 1.0
        trainer.train()
        runs.append(trainer)
    eager, planned = runs
    assert len({row["loss"] for row in logged(eager) if "loss" in row}) > 4
    for found, expected in zip(logged(planned), logged(eager), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert_same_weights(planned.model, eager.model)


class Asking(Trainer):
    """Loss by what may be among the arguments."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **options)
        weight = getattr(self.args, "own_weight", 2.0)
        return (found[0] * weight, found[1]) if isinstance(found, tuple) else found * weight


class PlannedAsking(GasTrainer, Asking):
    """The same, planned."""


def test_losses_may_ask_for_attributes_that_are_not_there(tmp_path: Path) -> None:
    """It was captured again for every batch, as all of the trainer was compared."""
    runs = []
    for kind, own in ((Asking, {}), (PlannedAsking, {"budget": BUDGET})):
        runs.append(made(kind, tmp_path / kind.__name__, {"optim": "sgd"}, **own))
        runs[-1].train()
    assert logged(runs[1]) == [pytest.approx(row, rel=1e-5) for row in logged(runs[0])]
    assert_same_weights(runs[1].model, runs[0].model)


class Changing(TrainerCallback):
    """Changes what is part of a planned step."""

    trainer: Any = None

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.change(self.trainer)


def clip(trainer: Any) -> None:
    trainer.args.max_grad_norm = 0.5


def replace_loss(trainer: Any) -> None:
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.sum()


@pytest.mark.parametrize("change", [clip, replace_loss])
def test_changes_of_what_is_planned_are_refused(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    callback = Changing(change)
    trainer = made(GasTrainer, tmp_path, budget=BUDGET, callbacks=[callback])
    callback.trainer = trainer
    with pytest.raises(UnsupportedOpError, match="max_grad_norm, compute_loss_func"):
        trainer.train()


class Looking(TrainerCallback):
    """Looks at the step while it is open, and stops the run by an error."""

    def __init__(self) -> None:
        self.trainer: GasTrainer | None = None
        self.peak_bytes = self.budget_bytes = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note what the step took."""
        assert self.trainer is not None
        step = self.trainer.step
        assert step is not None and step.plan is not None and step.last_run is not None
        self.peak_bytes = step.last_run.peak_bytes["cpu"]
        self.budget_bytes = step.plan.budget_bytes["cpu"]
        raise KeyError("stopped")


def test_an_error_gives_the_values_back(tmp_path: Path) -> None:
    """A run that ends in an error leaves a model and an optimizer that go on, and its steps kept the budget."""
    look = Looking()
    trainer = made(GasTrainer, tmp_path, SHORT, budget=BUDGET, callbacks=[look])
    look.trainer = trainer
    with pytest.raises(KeyError, match="stopped"):
        trainer.train()
    assert 0 < look.peak_bytes <= look.budget_bytes == 16 << 20
    assert trainer.step is None
    assert all(p.untyped_storage().nbytes() for p in trainer.model.parameters())
    assert all("exp_avg" in state for state in trainer.optimizer.state.values())


def test_clipping_by_gradients_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    trainer = made(GasTrainer, tmp_path, {**SHORT, "max_grad_norm": 1.0}, budget=BUDGET)
    trainer.optimizer = torch.optim.SGD(list(trainer.model.parameters())[1:], lr=0.1)
    with pytest.raises(UnsupportedOpError, match="freeze it by requires_grad_"):
        trainer.train()


class Between(TrainerCallback):
    """Acts between gradients and the update."""

    def __init__(self, act: Callable[[nn.Module, Any], object]) -> None:
        self.act = act
        self.seen: list[object] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **given: Any) -> None:
        """Do it, and keep what came of it."""
        self.seen.append(self.act(model, given["optimizer"]))


def facts(model: nn.Module, optimizer: Any) -> object:
    """Return what is the same before the update as after it, and something of its own."""
    count = torch.zeros(2) + sum(p.numel() for p in model.parameters() if p.requires_grad)
    shapes = [tuple(p.shape) for p in model.parameters()]
    return shapes, count.tolist(), optimizer.param_groups[0]["lr"]


def test_callbacks_between_gradients_and_updates_see_what_trainers_see(tmp_path: Path) -> None:
    """What they may ask for is the same, update by update, and what is trained, too."""
    seen, trained = [], []
    for kind in (Trainer, GasTrainer):
        between = Between(facts)
        budget = {"budget": BUDGET} if kind is GasTrainer else {}
        trainer = made(kind, tmp_path, SHORT, callbacks=[between], **budget)
        trainer.train()
        seen.append(between.seen)
        trained.append(trainer.model.state_dict())
        assert "on_pre_optimizer_step" not in vars(trainer.callback_handler)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 1
    for name, value in trained[1].items():
        torch.testing.assert_close(value, trained[0][name], msg=name)


def scaled(model: nn.Module, _: Any) -> None:
    """Change gradients as callbacks do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.1)


def lower_rate(_: nn.Module, optimizer: Any) -> None:
    """Change the update to come."""
    optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (scaled, "looks at gradients or values"),
        (lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), "gradients"),
        (lambda model, _: next(model.parameters()).norm(), "looks at gradients or values"),
        (lambda model, _: next(model.parameters()).data, "looks at gradients or values"),
        (lambda model, _: model.requires_grad_(False), "looks at gradients or values"),
        (lambda model, _: model.zero_grad(), "looks at gradients or values"),
        (lambda _, optimizer: optimizer.zero_grad(), r"calls zero_grad\(\)"),
        (lambda _, optimizer: optimizer.step(), r"calls step\(\)"),
        (lambda _, optimizer: optimizer.state_dict(), r"calls state_dict\(\)"),
        (lambda _, optimizer: optimizer.load_state_dict({}), r"calls load_state_dict\(\)"),
        (lambda _, optimizer: optimizer.state.clear(), "for the state"),
        (lower_rate, "param_groups"),
    ],
)
def test_callbacks_that_need_gradients_before_the_update_are_refused(
    act: Callable[[nn.Module, Any], object], said: str, tmp_path: Path
) -> None:
    """Whatever of theirs would be otherwise than with Trainer; the model goes on without them."""
    trainer = made(GasTrainer, tmp_path, SHORT, budget=BUDGET, callbacks=[Between(act)])
    with pytest.raises(UnsupportedOpError, match=f"on_pre_optimizer_step.*{said}"):
        trainer.train()
    trainer.remove_callback(Between)
    trainer.train()


@pytest.mark.parametrize(
    ("arguments", "own", "error", "said"),
    [
        ({}, {"step_options": {"accumulate": 2}}, ValueError, "accumulate"),
    ],
)
def test_what_is_refused_says_what_to_do(
    arguments: dict[str, Any],
    own: dict[str, Any],
    error: type[Exception],
    said: str,
    tmp_path: Path,
) -> None:
    """Arguments that say a thing twice."""
    with pytest.raises(error, match=said):
        made(GasTrainer, tmp_path, {**SHORT, **arguments}, budget=BUDGET, **own).train()


def test_adafactor_that_schedules_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library's schedule for its logs finds no gradients, which is told; updates are the same."""
    trained = []
    for kind in (Trainer, GasTrainer):
        model = small_model()
        own = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
        budget = {"budget": BUDGET} if kind is GasTrainer else {}
        options = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
        schedule = AdafactorSchedule(own)
        trainer = made(kind, tmp_path, options, model=model, optimizers=(own, schedule), **budget)
        trainer.train()
        trained.append(model)
    wanted = trained[0].state_dict()
    for name, value in trained[1].state_dict().items():
        # Biases begin at zero, and are some 1e-8 after three updates.
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-12, msg=name)
    assert "AdafactorSchedule" in caplog.text
