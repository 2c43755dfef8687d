"""The training step that users call: planned once per kind of batch, run under a budget."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import fx

from gascompile.capture.batches import admit, leaves_of
from gascompile.capture.torch_settings import require_followed
from gascompile.core.errors import (
    BudgetExceededError,
    OpenStepError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.kernels import FusedReport
from gascompile.core.plan import Plan
from gascompile.core.reports import GraphReport, RunReport
from gascompile.core.waiting import in_turn
from gascompile.machines.op_times import computes_here
from gascompile.machines.run_within_budget import log_replan, planned_again
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.run.recording import Recording
from gascompile.training.capture.requirements import (
    require_alone,
    require_bare_batch,
    require_own_saves,
)
from gascompile.training.optimizers.optimizers import require_rule, structure
from gascompile.training.optimizers.unplanned import BudgetWatch, update
from gascompile.training.planning.kinds import kind_of
from gascompile.training.rank_step import RankStep
from gascompile.training.saved_plans import save_plans
from gascompile.training.state.holdings import Holdings
from gascompile.training.state.open_tensors import values_of
from gascompile.training.state.train_state import States
from gascompile.training.step_job import StepJob
from gascompile.training.step_values import StepValues
from gascompile.training.unit import StepUnit
from gascompile.training.unit_table import UnitTable
from gascompile.training.units import UnitMaker, require_free


class TrainingStep(StepValues):
    """A compiled training step. Calls from several threads take turns.

    While it is open it has the model's values. Who reads a parameter or a buffer gets a copy, who writes to one
    writes to the step's; ``close`` puts them back.
    """

    def __init__(self, job: StepJob, ranks: RankStep | None = None) -> None:
        """Take the model over; see ``compile_step``."""
        self._settings = job.settings
        self._maker = UnitMaker(job)
        units = UnitTable(self._maker, job.settings)
        holdings = Holdings(job.model, self._maker, units)
        super().__init__(
            job.model,
            job.optimizer,
            values=job.values,
            units=units,
            holdings=holdings,
            ranks=ranks,
        )
        holdings.outlive(self)
        if ranks is not None:
            with ranks.together():
                ranks.keep_network(
                    job.config.cache_dir, self.pages, moves=computes_here(job.machine)
                )
            self._maker.ranks, self._maker.pipeline = ranks, ranks.pipeline
            holdings.leave = ranks.leave
        out = [link for link in job.machine.links if link.name == "cpu->nvme"]
        self._write_bytes_per_s = out[0].bandwidth_bytes_per_s if out else math.inf
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

    @in_turn
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
        with self._agreed():
            updates = self._settings.updates_at(before, updates)
        unit, states, (loss, *norms) = self._run_within_budget(batch, trains=True, updates=updates)
        states.pending |= unit.program.gradients
        norm: torch.Tensor | None = norms[0] if norms else None
        if updates and self._settings.unplanned:
            norm = self._holdings.change(unit, partial(update, states, self._settings))
        if norm is not None:
            assert self.last_run is not None, "it has just run"
            self.last_run = replace(self.last_run, grad_norm=float(norm))
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

    @in_turn
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
            _, _, (loss,) = self._run_within_budget(batch, trains=False)
        finally:
            for module, training in modes.items():
                module.training = training
        self._holdings.unfinished.end()
        return loss

    @in_turn
    def model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on the values of now, under the same budget and without gradients; return what it returns.

        Modules are in the mode that they are in: after ``model.eval()`` without dropout, for example. Each kind of
        arguments has a plan of its own. Results are the caller's, and lie beside the budget once they are returned.

        Raises:
            CaptureError: the model cannot be traced, or returns what is not made of tensors.
            InfeasiblePlanError: the budget is too small for these arguments; names the smallest.
            StorageError: a transfer failed, now or before; values may be half updated until ``load``.
            UnsupportedOpError: parameters are divided among ranks, so that one alone cannot call it.
            ValueError: nothing is planned yet: pass ``example_batch``, or call ``prepare``.
        """
        states = self._open_states()
        if states.divided or states.spread:
            raise UnsupportedOpError(
                "parameters are divided among the ranks, and a call of the model is one rank's own: let all ranks call "
                "eval of the step, or close it first"
            )
        unit, _, outputs = self._run_within_budget((args, kwargs), trains=False, calls=True)
        self._holdings.unfinished.end()
        return unit.result(outputs)

    @in_turn
    def prepare(self, batch: Any) -> None:
        """Plan for batches like this one, unless that has been done."""
        ranks = self.ranks
        with (
            ranks.together() if ranks else nullcontext(),
            ranks.planning() if ranks else nullcontext(),
        ):
            if ranks is not None:
                ranks.require_rows(batch)
            for number in range(min(self._settings.accumulate, 2)):
                self._unit(batch, trains=True, updates=number == 0)

    def _unit(
        self, batch: Any, *, trains: bool, updates: bool = False, calls: bool = False
    ) -> StepUnit:
        admit(batch)
        require_bare_batch(batch)
        if trains:
            require_own_saves()
        self._require_unchanged()
        # One program for all of them, where torch's own optimizer updates.
        updates = updates and not self._settings.unplanned
        pending = self._states.pending if self._states and updates else frozenset()
        covers = self._states.covers if self._states else None
        of = (covers.modules, covers.parameters) if covers else None
        kind = kind_of(self._model, batch, trains=trains, calls=calls, of=of)
        unit = self._units.find(kind, updates=updates, pending=pending)
        if unit is not None:
            return unit
        self._holdings.settle_all()
        unit = self._units.make(
            kind, batch, trains=trains, updates=updates, pending=pending, calls=calls
        )
        self.plan, self.graph_module = unit.plan, unit.graph_module
        if trains and self._settings.unplanned:
            self._watch.look(self._open_states(), self.plan)
        return unit

    def _require_unchanged(self) -> None:
        """Refuse a model that another step has taken over, and groups other than those planned for."""
        self._require_open()
        require_alone(self._settings.layout)
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

    def _run_within_budget(
        self, batch: Any, *, trains: bool, updates: bool = False, calls: bool = False
    ) -> tuple[StepUnit, States, Sequence[torch.Tensor]]:
        """Run what is planned for a batch; plan again where an op takes more than the plan has for it."""
        unit: StepUnit | None = None

        def run() -> tuple[StepUnit, States, Sequence[torch.Tensor]]:
            nonlocal unit
            with ranks.planning() if ranks else nullcontext():
                require_followed(trains=trains)
                if ranks is not None:
                    ranks.require_rows(batch)
                unit = self._unit(batch, trains=trains, updates=updates, calls=calls)
            return unit, *self._run(unit, batch, ranks)

        # A call is this rank's own: it needs no other.
        ranks = None if calls else self.ranks
        with ranks.together() if ranks else nullcontext():
            return planned_again(
                run,
                lambda error: unit is not None and self._maker.learns(unit, error),
                lambda error: unit is not None and self._drops(unit, error),
            )

    def _drops(self, unit: StepUnit, error: BudgetExceededError) -> bool:
        """Return whether a plan that knows what was found may be tried: nothing has changed yet."""
        if self._holdings.failure:
            return False
        log_replan(error)
        self._holdings.settle(unit)
        self._units.drop(unit)
        # Others are in the middle of the step; the next job plans with what was learnt.
        return self.ranks is None

    def _run(
        self, unit: StepUnit, batch: Any, ranks: RankStep | None
    ) -> tuple[States, Sequence[torch.Tensor]]:
        states = self._open_states()
        number, groups = states.num_steps + 1, range(unit.program.num_groups)
        hyper = [states.rules.hyper(group, states.counts, number) for group in groups]
        for other in self._units:
            if other is not unit:
                self._holdings.settle(other)
        unit.program.require_outside()
        if ranks is not None:
            ranks.meet(unit, batch, hyper, states)
        states.covers.changed()
        outside = map(values_of, unit.program.outside)
        inputs = [*leaves_of(batch), *outside, *hyper]
        unfinished = self._holdings.unfinished
        unfinished.begin(states.persistent)
        try:
            with self._settings.watch(number), ranks.running() if ranks else nullcontext():
                outputs, self.last_run = unit.run(inputs, self.recording)
            states.persistent.require_read()
        except BaseException as error:
            if isinstance(error, StorageError) or not unfinished.tidied(states.persistent):
                self._holdings.failed_by(error)
            raise
        if ranks is not None and unit.trains:
            ranks.ran(unit, self.last_run)
        return states, outputs

    @in_turn
    def save_plan(self, folder: str | os.PathLike[str]) -> None:
        """Write the plans made so far as ``folder``, for ``compile_step(..., plan=folder)`` in any process.

        Raises:
            PlanMismatchError: a plan rests on what another process cannot compare, or nothing has been planned yet.
            StorageError: the folder cannot be written, or holds something else.
            UnsupportedOpError: plans of several ranks, of which each is one rank's own.
        """
        if self.ranks is not None:
            raise UnsupportedOpError(
                "plans of several ranks differ by rank, and a folder holds those of one process; the cache keeps them"
            )
        save_plans(self._units, Path(folder))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: threads, files and memory are one step's.

        Raises:
            OpenStepError: says what to copy.
        """
        raise OpenStepError(
            "a training step cannot be copied or pickled; its model and its optimizer can, and save() writes what "
            "another process goes on from"
        )

    @in_turn
    def close(self) -> None:
        """Put parameters back into the model and its state into the optimizer; give memory and files back.

        The optimizer's state stays out, with a warning, where memory is too small for it, and after a
        failed step. Idempotent.

        Raises:
            StorageError: a value cannot be read.
        """
        self._holdings.close()
        if self.ranks is not None:
            self.ranks.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self.ranks is not None and error is not None:
            # Others may be in the middle of a step.
            self.ranks.leave(error)
        self.close()
