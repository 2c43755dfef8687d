"""The training step that users call: planned once per kind of batch, run under a budget."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.capture.batches import admit
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import (
    BudgetExceededError,
    CheckpointError,
    ClosedStepError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.kernels import FusedReport
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.reports import GraphReport, RunReport
from gascompile.machines.run_within_budget import planned_again
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.run.recording import Recording
from gascompile.training.capture.requirements import require_alone, require_no_gradient
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.optimizers.optimizers import require_rule, structure
from gascompile.training.optimizers.unplanned import BudgetWatch, changed_by, update
from gascompile.training.planning.kinds import kind_of
from gascompile.training.saved_plans import SavedPlans, save_plans
from gascompile.training.settings import Settings
from gascompile.training.state.checkpoints import CheckpointFolder
from gascompile.training.state.file_values import FileValues
from gascompile.training.state.holdings import Holdings
from gascompile.training.state.open_tensors import values_of
from gascompile.training.state.train_state import States
from gascompile.training.unit import Unit
from gascompile.training.unit_table import UnitTable
from gascompile.training.units import UnitMaker, require_free


class TrainingStep:
    """A compiled training step. Not for several threads at once.

    While it is open it has the model's values. Who reads a parameter or a buffer gets a copy, who writes to one
    writes to the step's; ``close`` puts them back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        budget: Budget,
        machine: Machine,
        config: CompileConfig,
        settings: Settings,
        values: FileValues | None = None,
        saved: SavedPlans | None = None,
    ) -> None:
        """Take the model over; see ``compile_step``."""
        self._model, self.optimizer = model, optimizer
        self._settings, self._values = settings, values
        self._maker = UnitMaker(
            model,
            loss_fn,
            optimizer,
            budget=budget,
            machine=machine,
            config=config,
            settings=settings,
            values=values,
            saved=saved,
        )
        self._units = UnitTable(self._maker, settings)
        self._holdings = Holdings(model, self._maker, self._units)
        self._holdings.outlive(self)
        self._watch = BudgetWatch(self._maker.transfer_bytes)
        self.plan: Plan | None = None
        self.graph_module: fx.GraphModule | None = None
        """The program of ``plan`` with its moves; ``graph_module.code`` shows the schedule as a program."""
        self.last_run: RunReport | None = None
        self.recording: Recording | None = None
        """Where runs are written down while it is set; see ``timeline.record``."""

    @property
    def pages(self) -> Pages | None:
        """Where large values lie; ``None`` where that is the heap."""
        return self._maker.pages

    @property
    def fused(self) -> FusedReport | None:
        """How many ops of ``plan`` run as compiled kernels, or why none does; ``None`` for ``fuse="off"``."""
        return next((unit.fused for unit in self._units if unit.plan is self.plan), None)

    @property
    def graphs(self) -> GraphReport | None:
        """How many ops of ``plan`` run in how many CUDA graphs, or why none does; ``None`` where none can be."""
        return next((u.executor.graph_report for u in self._units if u.plan is self.plan), None)

    @property
    def _states(self) -> States | None:
        return self._holdings.states

    @property
    def num_steps(self) -> int:
        """Updates made so far, with those that were taken over from the optimizer or a checkpoint."""
        return self._states.num_steps if self._states else 0

    def __call__(self, batch: Any, *, updates: bool | None = None) -> torch.Tensor:
        """Run one step: forward, backward and update. Return the loss, a scalar without a graph.

        Args:
            batch: of the kind of ``example_batch``, or of another, which is planned for first.
            updates: whether an update ends this batch; by default it does after every ``accumulate``-th one
                since the last. An epoch that ends early has an update of fewer batches.

        Raises:
            InfeasiblePlanError: the budget is too small for batches of this shape; names the smallest.
            StorageError: a transfer failed, now or before; values may be half updated until ``load``.
            ValueError: ``updates=False`` where no gradients are kept: ``accumulate`` is 1.
        """
        before = self._states.num_batches if self._states else 0
        updates = self._settings.updates_at(before, updates)
        unit, states, loss = self._run_within_budget(batch, trains=True, updates=updates)
        states.pending |= unit.program.gradients
        if updates and self._settings.unplanned:
            self._holdings.change(unit, partial(update, states, self._settings.max_grad_norm))
        states.num_batches = 0 if updates else states.num_batches + 1
        self.plan, self.graph_module = unit.plan, unit.graph_module
        if updates:
            states.stepped()
            if self._settings.unplanned:
                self._watch.look(states, unit.plan)
            # What schedulers look at to see that the optimizer has stepped before them.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._holdings.unfinished.end()
        return loss

    def eval(self, batch: Any) -> torch.Tensor:
        """Return the loss in evaluation mode, without an update, under the same budget.

        Modules behave as after ``model.eval()``: no dropout, normalisation by running statistics. The loss may be
        any scalar then, such as the number of right answers; it needs no gradient.

        Raises:
            InfeasiblePlanError: the budget is too small for batches of this shape; names the smallest.
            StorageError: a transfer failed, now or before; values may be half updated until ``load``.
        """
        if self._states is None:
            # An evaluation does not show which parameters are trained.
            self.prepare(batch)
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            _, _, loss = self._run_within_budget(batch, trains=False)
        finally:
            for module, training in modes.items():
                module.training = training
        self._holdings.unfinished.end()
        return loss

    def prepare(self, batch: Any) -> None:
        """Plan for batches like this one, unless that has been done."""
        for number in range(min(self._settings.accumulate, 2)):
            self._unit(batch, trains=True, updates=number == 0)

    def _unit(self, batch: Any, *, trains: bool, updates: bool = False) -> Unit:
        admit(batch)
        require_no_gradient(batch)
        self._require_unchanged()
        # One program for all of them, where torch's own optimizer updates.
        updates = updates and not self._settings.unplanned
        pending = self._states.pending if self._states and updates else frozenset()
        kind = kind_of(self._model, batch, trains=trains)
        unit = self._units.find(kind, updates=updates, pending=pending)
        if unit is not None:
            return unit
        self._holdings.settle_all()
        unit = self._units.make(kind, batch, trains=trains, updates=updates, pending=pending)
        self.plan, self.graph_module = unit.plan, unit.graph_module
        if trains and self._settings.unplanned:
            self._watch.look(self._open_states(), self.plan)
        return unit

    def _require_unchanged(self) -> None:
        """Refuse a model that another step has taken over, and groups other than those planned for."""
        self._require_open()
        require_alone()
        if not self._settings.unplanned:
            require_rule(self.optimizer)
        if self._states is None:
            require_free(self._model)
            self._structure = structure(self.optimizer, moments=not self._settings.unplanned)
            return
        self._states.covers.require_in_place()
        if structure(self.optimizer, moments=not self._settings.unplanned) != self._structure:
            raise UnsupportedOpError(
                "the optimizer's groups have other parameters, or momentum where there was none, than the step was "
                "planned for; close the step and compile a new one"
            )

    def _require_open(self) -> None:
        if self._holdings.is_closed:
            raise ClosedStepError(
                "the step is closed and has given its values back; compile a new step with compile_step"
            )

    def _run_within_budget(
        self, batch: Any, *, trains: bool, updates: bool = False
    ) -> tuple[Unit, States, torch.Tensor]:
        """Run what is planned for a batch; plan again where an op takes more than the plan has for it."""
        unit: Unit | None = None

        def run() -> tuple[Unit, States, torch.Tensor]:
            nonlocal unit
            unit = self._unit(batch, trains=trains, updates=updates)
            return unit, *self._run(unit, batch)

        return planned_again(run, lambda error: unit is not None and self._learns(unit, error))

    def _learns(self, unit: Unit, error: BudgetExceededError) -> bool:
        """Return whether a plan that knows what was found may be tried: nothing has changed yet."""
        if self._holdings.failure or not self._maker.learns(unit, error):
            return False
        self._holdings.settle(unit)
        self._units.drop(unit)
        return True

    def _run(self, unit: Unit, batch: Any) -> tuple[States, torch.Tensor]:
        states = self._open_states()
        number, groups = states.num_steps + 1, range(unit.program.num_groups)
        hyper = [states.rules.hyper(group, states.counts, number) for group in groups]
        for other in self._units:
            if other is not unit:
                self._holdings.settle(other)
        unit.program.require_outside()
        states.covers.changed()
        outside = map(values_of, unit.program.outside)
        inputs = [*pytree.tree_leaves(batch), *outside, *hyper]
        unfinished = self._holdings.unfinished
        unfinished.begin(states.persistent)
        try:
            with self._settings.watch(number):
                (loss,), self.last_run = unit.run(inputs, self.recording)
            states.persistent.require_read()
        except BaseException as error:
            if isinstance(error, StorageError) or not unfinished.tidied(states.persistent):
                self._holdings.failed_by(error)
            raise
        return states, loss.detach()

    def _open_states(self, *, whole: bool = True) -> States:
        self._require_open()
        if self._states is None:
            raise ValueError("nothing is planned yet; pass example_batch, or call prepare(batch)")
        held = self._holdings
        if not held.failure and not held.unfinished.tidied(self._states.persistent):
            held.failure = "it was interrupted"
        if whole:
            held.require_whole()
        return self._states

    def settle(self) -> None:
        """Let no transfer be under way; the next step takes longer, as it begins with none.

        Raises:
            StorageError: a transfer failed.
        """
        self._open_states()
        self._holdings.settle_all()

    def state_places(self) -> dict[str, tuple[int, int]]:
        """Return the file and offset of each value's copy, which may be old; for measurements after ``settle``."""
        return self._open_states().persistent.places()

    def state_dict(self) -> dict[str, Any]:
        """Return copies in memory of ``model.state_dict()`` and ``optimizer.state_dict()``, by these words.

        Raises:
            StorageError: a value cannot be read.
        """
        self._require_open()
        if self._states is None and self._values is None:
            return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}
        states = self._open_states()
        self._holdings.settle_all()
        return states.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``.

        Raises:
            CheckpointError: the state is of another model or optimizer; names the keys. Nothing has changed then.
            StorageError: a value cannot be kept.
        """
        self._require_open()
        if self._states is None and self._values is None:
            self._model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        with self._restoring() as states:
            states.load_state_dict(state)

    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint in ``folder``, in place of the one before, and return where it lies.

        Args:
            folder: this run's own until ``close``.
            extra: JSON values that ``load`` returns, such as ``scheduler.state_dict()``.

        Raises:
            StorageError: another job saves there, or it cannot be written; the checkpoint before stays valid.
            ValueError: nothing has been planned yet, or ``extra`` is no JSON.
        """
        states = self._open_states()
        self._holdings.settle_all()
        return self._checkpoints(folder).save(states, self._changing(states), extra or {})

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore all of the newest checkpoint, torch's random numbers included; return its ``extra``.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another run. Nothing has changed then.
            StorageError: another job saves there, or a value cannot be kept.
            ValueError: nothing has been planned yet.
        """
        with self._restoring() as states:
            return self._checkpoints(folder).load(states, self._changing(states))

    def save_plan(self, folder: str | os.PathLike[str]) -> None:
        """Write the plans made so far as ``folder``, for ``compile_step(..., plan=folder)`` in any process.

        Raises:
            PlanMismatchError: a plan rests on what another process cannot compare, or nothing has been planned yet.
            StorageError: the folder cannot be written, or holds something else.
        """
        save_plans(self._units, Path(folder))

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[States]:
        """Make values whole again that a failed step has left half updated."""
        states = self._open_states(whole=False)
        failure = self._holdings.failure
        # Until all is done, as an interrupt may come between any two lines.
        self._holdings.unfinished.changes()
        self._holdings.failure = ""
        try:
            with contextlib.suppress(*([StorageError] if failure else [])):
                self._holdings.settle_all()
            if failure:
                self._holdings.failure = failure
                states.persistent.recover()
            yield states
        except CheckpointError:
            # Found before anything was changed.
            self._holdings.failure = failure
            self._holdings.unfinished.end()
            raise
        except BaseException as error:
            self._holdings.failed_by(error)
            raise
        self._holdings.unfinished.end()
        self._holdings.failure = ""

    def _checkpoints(self, folder: str | os.PathLike[str]) -> CheckpointFolder:
        found = CheckpointFolder(Path(folder).resolve())
        return self._holdings.folders.setdefault(found.folder, found)

    def _changing(self, states: States) -> frozenset[str]:
        return changed_by(states).union(*(unit.program.program.states for unit in self._units))

    def close(self) -> None:
        """Put parameters back into the model and its state into the optimizer; give memory and files back.

        The optimizer's state stays out, with a warning, where memory is too small for it, and after a
        failed step. Idempotent.

        Raises:
            StorageError: a value cannot be read.
        """
        self._holdings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
