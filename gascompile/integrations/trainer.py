"""Trainer: transformers' ``Trainer`` whose steps are planned for a memory budget.

Everything but the step itself is the library's: data, accumulation, schedulers, callbacks, logs, evaluation, its
own checkpoints and how they are resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.optimization import AdafactorSchedule
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import _is_peft_model

from gascompile.core.budget import Budget
from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.before_update import before_update
from gascompile.integrations.step_options import own_options
from gascompile.integrations.trainer_methods import (
    require_class_loss,
    require_methods,
    takes_library_loss,
)
from gascompile.training.compile_step import compile_step
from gascompile.training.step import TrainingStep

_log = logging.getLogger(__name__)


class GasTrainer(Trainer):
    """A ``Trainer`` that keeps a memory budget.

    Losses, learning rates, norms of gradients and checkpoints are those of ``Trainer`` with the same arguments.
    Between ``train()`` and its end the model's values are where the step keeps them; saving, evaluating and
    callbacks read them as ever.
    """

    def __init__(
        self,
        *args: Any,
        budget: Budget | int | str | None = None,
        step_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Take what ``Trainer`` takes.

        Args:
            *args: of ``Trainer``.
            budget: memory the steps may take in the tier that computes (``"2GiB"``, bytes), or a ``Budget``.
            step_options: further arguments of ``compile_step``: ``machine``, ``cache_dir``, ``checkpoint``,
                ``states``, ``unplanned_optimizer``, ``on_nan`` and so on.
            **options: of ``Trainer``.

        Raises:
            UnsupportedOpError: the arguments ask for several processes, a device that Trainer moves the model to, or
                scaled losses.
            ValueError: ``step_options`` has what ``TrainingArguments`` say.
        """
        super().__init__(*args, **options)
        self._budget = budget
        self._step_options = own_options(step_options, "the trainer's own arguments")
        self._step: TrainingStep | None = None
        self._compiled_for: tuple[float, bool] | None = None
        self._planned: _PlannedOptimizer | None = None
        _require_followed(self)
        require_methods(self, GasTrainer)

    @property
    def step(self) -> TrainingStep | None:
        """The step that is open while ``train()`` runs, for its ``plan`` and ``last_run``."""
        return self._step

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **options)
        finally:
            self._end()

    def _end(self) -> None:
        """Give the values back to model and optimizer."""
        step, planned = self._step, self._planned
        self._step = self._planned = None
        # Trainer's own again; a loop that ended before it began has set none.
        vars(self.callback_handler).pop("on_pre_optimizer_step", None)
        if planned is not None:
            self.optimizer = self.callback_handler.optimizer = planned.wrapped
        if step is not None:
            step.close()

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **options)  # type: ignore[no-untyped-call]
        # The scheduler goes on with the optimizer itself, whose groups each step reads.
        self._planned = _PlannedOptimizer(self.optimizer)
        self.optimizer = self.callback_handler.optimizer = self._planned
        vars(self.callback_handler)["on_pre_optimizer_step"] = self._before_update
        if isinstance(
            getattr(self.lr_scheduler, "scheduler", self.lr_scheduler), AdafactorSchedule
        ):
            _log.warning(
                "AdafactorSchedule tells the learning rate by gradients and states, which the planned step keeps: "
                "updates take the rate that they do with Trainer, logs and param_groups say the one that it begins with"
            )
        return prepared

    def _before_update(self, *args: Any, **options: Any) -> Any:
        """Call what callbacks do between gradients and updates, as far as it does not depend on either."""
        assert self._planned is not None, "train() has prepared an optimizer"
        handler = self.callback_handler
        with before_update(self._planned.planned), self._planned.refusing():
            return type(handler).on_pre_optimizer_step(handler, *args, **options)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run one planned step, with an update where ``Trainer`` would make one after it; return the loss."""
        model.train()
        # Named only where it counts: batches that differ in it have plans of their own.
        scaled = self._is_scaled(num_items_in_batch)
        count = None if scaled else self.current_gradient_accumulation_steps
        batch = _batch(self._prepare_inputs(inputs), num_items_in_batch, num_batches=count)
        require_class_loss(self)
        assert self._planned is not None, "train() has prepared an optimizer"
        if self._step is None:
            assert self.model is not None, "it is what is trained"
            arguments = self.args
            if arguments.max_grad_norm > 0:
                _require_all_trained(self.model, self._planned.planned)
            self._compiled_for = self._compiled()
            self._step = compile_step(
                self.model,
                self._traced_loss(),
                self._planned.planned,
                self._budget,
                batch,
                accumulate=arguments.gradient_accumulation_steps,
                max_grad_norm=arguments.max_grad_norm if arguments.max_grad_norm > 0 else None,
                **{"grad_norm": True, **self._step_options},
            )
        if self._compiled() != self._compiled_for:
            raise UnsupportedOpError(
                "max_grad_norm, compute_loss_func or label_smoother has changed while train() runs, and they are part "
                "of the planned step; set them before train()"
            )
        updates: bool = self.accelerator.gradient_state.sync_gradients
        loss: torch.Tensor = self._step(batch, updates=updates)
        self._planned.has_run = True
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate as ``Trainer`` does; under the budget, where only the loss is asked for while a step is open."""
        if self._step is None or not prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        # How the loss of an evaluation is scaled is the library's affair: it calls this with what it found.
        self.__dict__["compute_loss"] = self._evaluated_loss
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            del self.__dict__["compute_loss"]

    def _evaluated_loss(
        self,
        model: nn.Module,  # noqa: ARG002  # as Trainer calls it; the step has it
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        assert self._step is not None, "it is called while a step is open"
        loss = self._step.eval(_batch(inputs, num_items_in_batch, num_batches=None))
        return (loss, {}) if return_outputs else loss

    def _traced_loss(self) -> Any:
        """Return the loss of a batch as a function that holds no more of the trainer than it needs."""
        if self._takes_models_loss():
            return _ModelLoss(takes_number=bool(self.model_accepts_loss_kwargs))
        if self._takes_smoothed_loss():
            return _SmoothedLoss(self)
        # An argument, as what this package's own code reads is not looked for: a user's methods read the trainer.
        return partial(_trainers_loss, self)

    def _takes_models_loss(self) -> bool:
        return (
            takes_library_loss(self)
            and self.compute_loss_func is None
            and self.label_smoother is None
        )

    def _takes_smoothed_loss(self) -> bool:
        return (
            takes_library_loss(self)
            and self.compute_loss_func is None
            and type(self.label_smoother) is LabelSmoother
        )

    def _compiled(self) -> tuple[Any, ...]:
        """Return what a step is compiled for once, where ``Trainer`` looks at each batch."""
        smoother = vars(self.label_smoother).copy() if self._takes_smoothed_loss() else None
        return float(self.args.max_grad_norm or 0.0), self._takes_models_loss(), smoother

    def _is_scaled(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Return whether a loss is a share of its update's already, by the rule of ``Trainer``."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(by_model) or self.compute_loss_func is not None

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The planned step has clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:  # noqa: ARG002
        """Return the norm before clipping, which the step has seen: gradients are gone by now."""
        run = self._step.last_run if self._step is not None else None
        return run.grad_norm if run is not None else None


def _batch(
    inputs: Mapping[str, Any], num_items: torch.Tensor | int | None, *, num_batches: int | None
) -> dict[str, Any]:
    """Return what a traced loss takes; ``num_batches`` that share an update, none in an evaluation."""
    return {"inputs": dict(inputs), "num_items_in_batch": num_items, "num_batches": num_batches}


class _ModelLoss:
    """The loss that a model returns: the first, or the one by that name."""

    def __init__(self, *, takes_number: bool) -> None:
        self.takes_number = takes_number

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs, number = dict(batch["inputs"]), batch["num_items_in_batch"]
        if self.takes_number and number is not None:
            inputs["num_items_in_batch"] = number
        outputs = model(**inputs)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return _share(loss, batch)


class _SmoothedLoss:
    """The loss of smoothed labels, as ``Trainer.compute_loss`` has it.

    That asks what the model is wrapped in, by code in which names of the trainer's own state stand: its loss would be
    captured again for each batch.
    """

    def __init__(self, trainer: GasTrainer) -> None:
        self.smoother: Any = trainer.label_smoother
        self.takes_number = bool(trainer.model_accepts_loss_kwargs)
        model: Any = trainer.model
        inner = model.base_model.model if _is_peft_model(model) else model
        self.shifts = inner._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs, number = dict(batch["inputs"]), batch["num_items_in_batch"]
        labels = inputs.pop("labels", None)
        if self.takes_number and number is not None:
            inputs["num_items_in_batch"] = number
        outputs = model(**inputs)
        if labels is None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        else:
            how = {"shift_labels": True} if self.shifts else {}
            loss = self.smoother(outputs, labels, num_items_in_batch=number, **how)
        return _share(loss, batch)


def _trainers_loss(trainer: GasTrainer, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that a trainer computes by methods or functions of a user's."""
    number = batch["num_items_in_batch"]
    inputs = dict(batch["inputs"])
    # Of the class: in an evaluation the trainer's own leads here.
    compute_loss: Any = type(trainer).compute_loss
    loss: torch.Tensor = compute_loss(trainer, model, inputs, num_items_in_batch=number)
    return _share(loss, batch)


def _share(loss: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return what a batch adds to the loss of its update."""
    count = batch["num_batches"]
    return loss if count is None else loss / count


class _PlannedOptimizer(torch.optim.Optimizer):
    """What ``Trainer`` calls in place of an optimizer whose updates are part of the planned step."""

    def __init__(self, wrapped: Any) -> None:
        # Not the parent's: there is nothing to set up, all of it is the other's.
        self.wrapped = wrapped
        self.planned: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        self._is_between = False
        self.has_run = False
        """Whether a planned step has run since the last update."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse what callbacks ask between gradients and the update: it was made before them."""
        self._is_between = True
        try:
            yield
        finally:
            self._is_between = False

    def __getattr__(self, name: str) -> Any:
        if name == "state":
            self._require_after_update("for the state")
        return getattr(self.__dict__["planned"], name)

    def state_dict(self) -> dict[str, Any]:
        self._require_after_update("state_dict()")
        return self.planned.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._require_after_update("load_state_dict()")
        self.planned.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """The step has updated: schedulers, which were made for the wrapper, look whether it has."""
        self._require_after_update("step()")
        if not self.has_run:
            raise UnsupportedOpError(
                "no planned step has run since the last update, so there is nothing to update by: training_step is "
                "another one and does not call GasTrainer's. Override compute_loss instead, or return "
                "super().training_step(...)"
            )
        self.has_run, self.wrapped._opt_called = False, True

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """The step keeps gradients from one update to the next, and no longer."""
        self._require_after_update("zero_grad()")

    def _require_after_update(self, what: str) -> None:
        if self._is_between:
            raise UnsupportedOpError(
                f"a callback's on_pre_optimizer_step calls {what}, and the planned step has updated already; leave "
                "it out"
            )


def _require_all_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse gradients that ``Trainer`` would count among those that it clips, and no update uses."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise UnsupportedOpError(
                f"'{name}' requires a gradient, by which Trainer clips those of others, and the optimizer does not "
                "have it; freeze it by requires_grad_(False), or pass max_grad_norm=0"
            )


def _require_followed(trainer: GasTrainer) -> None:
    """Refuse what would be trained otherwise than ``Trainer`` does.

    Raises:
        UnsupportedOpError: says what to do.
    """
    arguments = trainer.args
    if arguments.world_size > 1:
        raise UnsupportedOpError(
            f"the trainer is one of {arguments.world_size} processes, and a planned step trains in one; start it "
            "without torchrun, or use Trainer"
        )
    if arguments.device.type != "cpu":
        raise UnsupportedOpError(
            f"the trainer would move the model to '{arguments.device}', and a planned step keeps it on the processor; "
            "pass TrainingArguments(use_cpu=True), and step_options={'machine': ...} for what computes"
        )
    if arguments.fp16:
        raise UnsupportedOpError("fp16 scales losses, which planned steps do not; use bf16=True")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UnsupportedOpError(
            "DeepSpeed and FSDP place the model by themselves; leave them out of TrainingArguments"
        )
