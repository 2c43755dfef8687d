"""The runner of a compiled model: its plans, of which the one in use holds memory, and its calls."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from gascompile.api.given_forward import GivenForward
from gascompile.api.guards import Values, refuse, require_apart, require_no_gradients
from gascompile.api.matching import FOR_GIVEN_INPUTS, Misfit, advice, follow_shapes
from gascompile.api.moved_states import has_taken_states
from gascompile.api.open_units import OpenUnits
from gascompile.api.planning import Args, Kwargs, Planning
from gascompile.api.ranges import Ranges
from gascompile.api.shared_budget import SharedBudget
from gascompile.api.started_ahead import require_made_for, started_ahead
from gascompile.api.unit import Unit
from gascompile.bundles.saving import lies_in, save_bundle
from gascompile.capture.calls import Call, CallNames, copies
from gascompile.capture.outlines import ModelOutlines
from gascompile.capture.saved.call_types import unflatten
from gascompile.capture.torch_settings import traced_by
from gascompile.core.config import default_cache_dir
from gascompile.core.errors import (
    CaptureError,
    InfeasiblePlanError,
    PlanMismatchError,
    UnsupportedOpError,
)
from gascompile.core.model_libraries import register_pytrees
from gascompile.core.waiting import Turn
from gascompile.machines.admission import device_of
from gascompile.machines.run_within_budget import run_within_budget
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session

if TYPE_CHECKING:
    from gascompile.precision.report import MeasuredError

_log = logging.getLogger(__name__)
_PARAMETERS = "_parameters"
MOST_PLANS = 16
"""That a model has at a time; others stay in the cache on disk."""
Made = TypeVar("Made")
Together = tuple[int, tuple[Unit, ...]]
"""Plans that share an arena, and which of several lists of calls they are for."""


class Runner:
    """Runs calls of a model by plans that fit its budget: one per input signature, or for a range of sizes.

    Only the plan in use holds memory. Calls from several threads take turns.
    """

    plans_again = True
    """Whether a call makes a plan again that turns out to be too small."""

    def __init__(
        self,
        *,
        positional: tuple[str, ...],
        units: list[Unit],
        planning: Planning | None = None,
        cache_dir: Path | None = None,
        on_exceed: str = "error",
        ranks: LocalRanks | None = None,
    ) -> None:
        """Open the first of ``units``.

        Args:
            positional: names of the leading arguments.
            units: plans that are there; with any, calls of other shapes are refused.
            planning: makes plans; ``None`` for a bundle, which knows no model.
            cache_dir: where kernels are kept and activations that move to a drive are written.
            on_exceed: as ``compile`` takes it.
            ranks: of this host, which share the memory of each plan.
        """
        if planning is not None:
            # Before the first call is taken apart.
            register_pytrees()
        self._turn = Turn()
        self._shared: SharedBudget | None = None
        self.units = units
        self.planning = planning
        self._is_fixed = bool(units)
        self._ranges = Ranges(planning.model) if planning is not None else None
        self._is_planning = False
        model = planning.model if planning is not None else None
        self._names = CallNames(positional, model)
        self._buffers = Values.of(model, "_buffers") if model is not None else None
        """Before the latest plan was made."""
        self._given_forward = GivenForward(model)
        self._values = Values.of(model, _PARAMETERS) if model is not None else None
        self._outlines = ModelOutlines(model) if model is not None else None
        self._cache_dir = cache_dir or default_cache_dir()
        self._open = OpenUnits(
            self._cache_dir, on_exceed=on_exceed, from_file=planning is None, ranks=ranks
        )
        self._last: Unit | None = units[0] if units else None
        for unit in units:
            unit.reads(self._buffers)
        if units:
            self._activate(units[0])

    @property
    def names(self) -> tuple[str, ...]:
        """What ``bind_call`` takes for calls of now."""
        return self._names.now(self._given_forward.counting(self))

    def call(self, args: Args, kwargs: Kwargs, taken_bytes: int = 0) -> Any:
        """Run the model; raises as ``CompiledModel.forward`` does.

        ``taken_bytes`` of the budget are left free by a plan that is made for this call.
        """
        call = Call.of(self.names, args, kwargs, taken_bytes)

        def run() -> Any:
            unit = self._unit_for(call)
            if written := unit.written_inputs(call.leaves):
                require_apart((self._values, unit.buffers), written)
            given, own = unit.given(call.leaves)
            outputs = self._run(unit, given)
            if own:
                follow_shapes(given, own)
                outputs = tuple(own.get(id(value), value) for value in outputs)
            model = self.planning.model if self.planning is not None else None
            outputs = require_no_gradients(call.leaves, outputs, model)
            return unit.returned(outputs, call)

        return self._turn.take(run)

    def _run(self, unit: Unit, leaves: list[Any]) -> tuple[Any, ...]:
        i, self._last = self.units.index(unit), unit
        again = self._planned_again if self.planning is not None and self.plans_again else None
        try:
            unit, outputs = run_within_budget(unit, leaves, self._activate, again, self._cache_dir)
        finally:  # after an error, too: what ops wrote until then is written, as in eager
            if (executor := self._open.executor) is not None and executor.written:
                self._pull_states(executor.written)
        self.units[i] = self._last = unit
        assert executor is not None, "it has just run"
        unit.last_run, unit.graph_report = executor.last_run, executor.graph_report
        if executor.computes_on_host:
            # Runs write unseen, and others may have read the same buffers into files.
            increment_version(unit.written)
        return outputs

    @property
    def device(self) -> torch.device:
        """Where ops compute."""
        made_for = self.planning or self.current().bundle.plan
        return device_of(made_for.machine)

    def measure_error(self, args: Args, kwargs: Kwargs) -> MeasuredError:
        """See ``CompiledModel.measure_error``."""
        from gascompile.precision.report import output_error

        if self.planning is None:
            raise PlanMismatchError(
                "a bundle holds the weights as they move and no others; measure the error where the model is compiled"
            )
        exact = self.planning.without_loss()
        call = Call.of(self.names, args, kwargs)

        def both() -> tuple[Any, ...]:
            self._last = unit = self._unit_for(call)
            exact_unit = exact.prepare(call.args, call.kwargs)
            return tuple(self._run_unchanged(u, call.leaves) for u in (unit, exact_unit))

        with torch.random.fork_rng(devices=[]):
            outputs, wanted = self._turn.take(both)
        return output_error(outputs, wanted)

    def _planned_again(self, unit: Unit) -> Unit:
        """Return a plan with what runs have taught about the memory of ops; all that share an arena are made again."""
        assert self.planning is not None
        if unit.again is None:
            again = self.planning.planned_again(unit)
            again.buffers = unit.buffers
            return again
        new = dict(zip(unit.beside, self._planned(self.planning, unit.again), strict=True))
        for of, now in new.items():
            now.buffers = of.buffers
        self.units = [new.get(of, of) for of in self.units]
        return new[unit]

    def _run_unchanged(self, unit: Unit, leaves: list[Any]) -> Any:
        """Run a plan once in a session of its own; what this changes is as before."""
        self._open.close()
        before = {name: tensor.detach().clone() for name, tensor in unit.bundle.held.items()}
        on_host = device_of(unit.bundle.plan.machine).type == "cpu"
        try:
            with torch.random.fork_rng(devices=[] if on_host else None):
                outputs = self._activate(unit).run(*unit.given(copies(leaves))[0])
            clones = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)
        finally:
            self._open.close()
            for name, tensor in unit.bundle.held.items():
                tensor.detach().copy_(before[name])
        return unflatten(clones, unit.out_spec)

    def pull_states(self) -> None:
        """Have the model's own states follow what calls changed on a device."""
        self._turn.take(self._pull_states)

    def _pull_states(self, written: Collection[str] | None = None) -> None:
        if self._open.session is not None:
            self._open.session.pull_states(written)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """See ``CompiledModel.save``."""
        from gascompile.bundles.check import note_checked

        self.pull_states()
        unit = self.current()
        if (why_not := unit.misfit_of_model() or self._changed(unit)) is not None:
            raise PlanMismatchError(f"{why_not.reason}; call the model once, and save then")
        digest = save_bundle(unit.bundle, Path(folder))
        if lies_in(unit.bundle, Path(folder)):
            # Those that were read from are links to the same content now.
            self.close()
        note_checked(digest, self._cache_dir)

    def share(self, budget: SharedBudget) -> None:
        """Take turns with others that have the same budget."""
        self._shared, self._turn = budget, budget.turn

    def close(self) -> None:
        """Free the arena and close the weight files."""
        self._turn.take(self._open.close)

    @property
    def session(self) -> Session | None:
        """The memory of the plan in use."""
        return self._open.session

    @property
    def executor(self) -> Executor | None:
        """What runs the plan in use."""
        return self._open.executor

    def current(self) -> Unit:
        """Return the plan of the latest call, or of the example inputs before any call."""
        if self._last is None:
            raise PlanMismatchError(
                "nothing is planned yet: call the compiled model once, or pass example_inputs to compile"
            )
        return self._last

    def _activate(self, unit: Unit) -> Executor:
        if self._open.has(unit):
            return self._open.use(unit)
        self.close()
        if self._shared is not None:
            self._shared.give_way(self)
        return self._open.open(unit)

    def _unit_for(self, call: Call) -> Unit:
        if self._is_planning:
            refuse(
                "the model that it was made from calls it while that is captured, by an attribute or a hook set since",
                "Take that away, or compile a part of the model that does not lead back to it",
            )
        if (mode := traced_by()) is not None:
            refuse(
                f"{mode} is active around its call, which no plan follows",
                "Call it outside of that, or use the model that it was made from there",
            )
        with self._given_forward.beside(self):
            return self._matching(call)

    def _matching(self, call: Call) -> Unit:
        # What can run without reading weights anew comes first, and of that what ran last.
        units = [*reversed(self.units)]
        units.sort(key=lambda unit: unit not in self._open.units)
        misfits = []
        for unit in units:
            why_not = unit.misfit(call.leaves, call.spec) or self._changed(unit)
            if why_not is None:
                return self._used(unit)
            misfits.append(why_not)
        # Where only that differs a plan is made though shapes are given once and for all.
        near = min(misfits, key=lambda why: (not why.is_value, not why.is_near), default=None)
        is_near = near is not None and near.is_near
        if self.planning is None or (self._is_fixed and not is_near):
            assert near is not None
            raise PlanMismatchError(f"{near.reason}. {advice(near)}")
        planning = self.planning.leaving(call.taken_bytes)
        if near is not None and near.is_value:
            _log.warning("%s: the model is planned again, as at each change of it", near.reason)
            # In the place of the one that is out of date, as a value may change at every call; once it can be made.
            return self._add(planning, call, of=units[misfits.index(near)])
        if near is not None and near.is_near:
            _log.info("%s: this call gets a plan of its own", near.reason)
        is_alone = near is None or near.is_near
        return self._add(planning, call) if is_alone else self._in_range(planning, call)

    def _used(self, unit: Unit) -> Unit:
        """Have the plans in the order in which they were used."""
        if self.units[-1] is not unit:
            self.units.remove(unit)
            self.units.append(unit)
        return unit

    def _in_range(self, planning: Planning, call: Call) -> Unit:
        """Return a plan for sizes around those of this call and of others, or for its own alone."""
        if planning.dynamic_shapes is None and self._ranges is not None:
            for attempt in self._ranges.attempts(self.units, call.leaves, call.spec):
                try:
                    unit = self._add(planning.ranged(attempt.dynamic_shapes), call, attempt.text)
                except (CaptureError, InfeasiblePlanError, UnsupportedOpError) as error:
                    _log.info("no plan for %s: %s", attempt.text, error)
                    continue
                self.units = [unit for unit in self.units if unit not in attempt.covered]
                return unit
        return self._add(planning, call)

    def _add(self, planning: Planning, call: Call, sizes: str = "", of: Unit | None = None) -> Unit:
        """Return a new plan, in the place of ``of``, or of the one used least lately if there are too many."""
        begun_s = time.perf_counter()
        is_alone = self.plans_again and self._shared is None
        with started_ahead(self._open, is_alone=is_alone) as begin:
            made = partial(planning.prepare, call.args, call.kwargs, begin)
            unit = require_made_for(self._planned(planning, made), call)
        if of in self.units:
            self.units.remove(of)
        self._keep(unit, sizes, begun_s)
        return unit

    def holds(self, units: Sequence[Unit]) -> bool:
        """Return whether all of some plans are still there."""
        return all(unit in self.units for unit in units)

    def together(self, plan: Callable[[Any], Together]) -> Together:
        """Have the plans that ``plan`` makes with a planning, which share an arena; return what it does."""

        def run() -> Together:
            begun_s, planning = time.perf_counter(), self.planning
            if planning is None or self._is_fixed:
                raise PlanMismatchError(FOR_GIVEN_INPUTS)
            with self._given_forward.beside(self):
                number, units = self._planned(planning, lambda: plan(planning))
            for unit in units:
                self._keep(unit, "", begun_s)
            return number, units

        return self._turn.take(run)

    def _keep(self, unit: Unit, sizes: str, begun_s: float) -> None:
        unit.reads(self._buffers)
        self.units.append(unit)
        seconds = time.perf_counter() - begun_s
        _log.info("plan %d of %s", len(self.units), unit.in_words(sizes, seconds))
        if len(self.units) > MOST_PLANS:
            dropped = self.units.pop(0)
            _log.warning(
                "%s has %d plans for calls of different sizes: the one for %s is dropped, and read from the cache or "
                "made again when it is needed. Pad inputs to few sizes, or pass dynamic_shapes=",
                unit.bundle.program.name, MOST_PLANS, dropped.sizes_in_words,
            )  # fmt: skip

    def _planned(self, planning: Planning, make: Callable[[], Made]) -> Made:
        model = planning.model
        # The model is looked at, and may be read into files.
        self._pull_states()
        noted = Values.of(model, _PARAMETERS), GivenForward(model), ModelOutlines(model)
        self._buffers = Values.of(model, "_buffers")
        is_out_of_date = self._changed() is not None
        if has_taken_states(self.session):
            self._open.close()
        self._is_planning = True
        try:
            made = make()
        finally:
            self._is_planning = False
        if is_out_of_date:
            self.units.clear()
        self._values, self._given_forward, self._outlines = noted
        return made

    def _changed(self, unit: Unit | None = None) -> Misfit | None:
        """Return what of the model is another than when plans were made: weights, its forward, or what it has.

        Buffers are those of one plan: what one writes to, another may have read from a file.
        """
        known: tuple[Any, ...] = self._values, self._given_forward, self._outlines
        changed = next(filter(None, (of.changed() for of in known if of is not None)), None)
        if not changed and unit is not None and unit.buffers is not None:
            changed = unit.buffers.changed()
        return Misfit(changed, is_value=True) if changed else None
