"""A compiled model: calls that look like the module's, executed by plans that fit a budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils import _pytree as pytree

from gascompile.api.matching import Misfit, advice, as_planned, misfit, require_inputs
from gascompile.bundles.bundle import Bundle, content_stamp, require_unchanged, write_bundle
from gascompile.bundles.files import Weights
from gascompile.bundles.reuse import Basis
from gascompile.capture.calls import bind_call, copies, flatten_call
from gascompile.capture.saved.call_types import unflatten
from gascompile.capture.saved.program_io import load_treespec, needs_import
from gascompile.capture.torch_settings import call_settings
from gascompile.codegen.allocator_library import allocation_counter
from gascompile.core.config import default_cache_dir
from gascompile.core.errors import PlanMismatchError
from gascompile.core.kernels import FusedReport
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.core.progress import LoadingBar, task
from gascompile.core.reports import GraphReport, RunReport
from gascompile.core.signature import quick_key, same_tensors
from gascompile.core.waiting import Turn
from gascompile.machines.admission import admit_plan, device_of
from gascompile.machines.run_within_budget import run_within_budget
from gascompile.passes.graph.insert import insert
from gascompile.passes.graph.to_device import to_device
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from gascompile.weights.store import is_spilled

if TYPE_CHECKING:
    from gascompile.codegen.fuse import LoadedFusion
    from gascompile.precision.report import FormatReport, MeasuredError

_log = logging.getLogger(__name__)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(eq=False)
class Unit:
    """One plan ready to be executed for one input signature."""

    bundle: Bundle
    graph_module: torch.fx.GraphModule
    last_run: RunReport | None = None
    early: EarlyMemory | None = None
    """Memory taken ahead for the first session."""
    fusion: LoadedFusion | None = None
    """The ops that run as compiled kernels; ``None`` where all run one by one."""
    graphs: str = "auto"
    """``off`` gives a device its ops one by one."""
    graph_report: GraphReport | None = None
    basis: Basis | None = None
    """The Python values that are part of the plan; ``None`` where no model is there."""
    _fit: tuple[Any, ...] = ()
    """What told the latest call that fitted from others; where tensors lie in memory is not part of it."""
    _fits_as_is: bool = False

    @staticmethod
    def of(bundle: Bundle, *, graphs: str = "auto") -> Unit:
        """Verify the plan, ask for its device, and insert its moves."""
        verify(bundle.plan)
        admit_plan(bundle.plan)
        program = to_device(bundle.program, device_of(bundle.plan.machine))
        require_inputs(bundle.program, bundle.plan.machine)
        unit = Unit(bundle=bundle, graph_module=insert(program, bundle.plan), graphs=graphs)
        if not needs_import(bundle.program.in_spec + bundle.program.out_spec):
            _ = unit.in_spec, unit.out_spec
        return unit

    @cached_property
    def in_spec(self) -> pytree.TreeSpec:
        """The structure of a call. Read when needed: its types may come from a library that is slow to import."""
        return load_treespec(self.bundle.program.in_spec)

    @cached_property
    def out_spec(self) -> pytree.TreeSpec:
        """The structure of what a call returns."""
        return load_treespec(self.bundle.program.out_spec)

    def misfit(self, leaves: list[Any], spec: pytree.TreeSpec) -> Misfit | None:
        """Return why a call does not fit the plan, or ``None`` when it does."""
        found = self._call_misfit(leaves, spec)
        changed = self.basis.changed() if found is None and self.basis is not None else None
        if changed is not None:
            return Misfit(f"{changed}, which is part of the plan", is_value=True)
        return found

    def _call_misfit(self, leaves: list[Any], spec: pytree.TreeSpec) -> Misfit | None:
        key = (quick_key(leaves), same_tensors(leaves), spec, call_settings())
        if key == self._fit:
            return None
        if spec != self.in_spec:
            return Misfit(
                f"the call has the structure {spec}, the plan was made for {self.in_spec}; pass the same arguments"
            )
        inputs = self.bundle.program.inputs
        found = misfit(self.bundle.plan, inputs, leaves)
        if found is None:
            # Where tensors lie is not in the key, and decides what is seen of writes to them.
            self._fit = key if not any(of.written for of in inputs) else ()
            self._fits_as_is = not as_planned(inputs, leaves)[1]
        return found

    def given(self, leaves: list[Any]) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Return what a call that fits gives to the plan, see ``as_planned``."""
        return (leaves, {}) if self._fits_as_is else as_planned(self.bundle.program.inputs, leaves)


class CompiledModel:
    """A model that runs within its budget. Call it as the module it was made from.

    One plan per input signature; only the plan in use holds memory. Results are computed without
    gradients. Calls from several threads take turns. Close it, or use ``with``, to free its memory early.
    """

    def __init__(
        self,
        *,
        positional: tuple[str, ...],
        units: list[Unit],
        prepare: Callable[[Args, Kwargs], Unit] | None = None,
        exact: Callable[[Args, Kwargs], Unit] | None = None,
        variant: Callable[[Args, Kwargs], Unit] | None = None,
        cache_dir: Path | None = None,
        replan: Callable[[Unit], Unit] | None = None,
        on_exceed: str = "error",
    ) -> None:
        self._turn = Turn()
        self._positional = positional
        self._units = units
        self._prepare = prepare
        self._exact = exact
        self._variant = variant
        self._cache_dir = cache_dir or default_cache_dir()
        self._replan, self._on_exceed = replan, on_exceed
        self._active: Unit | None = None
        self._session: Session | None = None
        self._executor: Executor | None = None
        self._bar: LoadingBar | None = None
        self._last: Unit | None = units[0] if units else None
        if units:
            self._activate(units[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            BudgetExceededError: an op asked for more memory than the budget has, after states had changed.
            PlanMismatchError: the inputs have another shape, dtype, device or structure than planned, or, of a
                bundle, other strides.
            UnsupportedOpError: an input is no plain dense tensor; or an op of a bundle refuses the values it is given,
                for which a compiled model raises what the model does.
            StorageError: a weight could not be read; the compiled model stays usable.
        """
        bound_args, bound_kwargs = bind_call(self._positional, args, kwargs)
        leaves, spec = flatten_call(bound_args, bound_kwargs)

        def call() -> Any:
            unit = self._unit_for(leaves, spec, bound_args, bound_kwargs)
            given, own = unit.given(leaves)
            outputs = self._run(unit, given)
            if own:
                outputs = tuple(own.get(id(value), value) for value in outputs)
            return unflatten(outputs, unit.out_spec)

        return self._turn.take(call)

    def _run(self, unit: Unit, leaves: list[Any]) -> tuple[Any, ...]:
        i, self._last = self._units.index(unit), unit
        start, again = self._activate, self._replan
        unit, outputs = run_within_budget(unit, leaves, start, again, self._cache_dir)
        self._units[i] = self._last = unit
        executor = self._executor
        assert executor is not None, "it has just run"
        unit.last_run, unit.graph_report = executor.last_run, executor.graph_report
        return outputs

    @property
    def plan(self) -> Plan:
        """The plan of the latest call, or of the example inputs before any call."""
        return self._current().bundle.plan

    @property
    def program(self) -> Program:
        """The captured program that ``plan`` belongs to."""
        return self._current().bundle.program

    @property
    def weights(self) -> Weights:
        """Where the weights of the program lie, by name, and the identity of their files."""
        return self._current().bundle.weights

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph with its moves; ``graph_module.code`` shows the schedule as a program."""
        return self._current().graph_module

    @property
    def last_run(self) -> RunReport | None:
        """What the latest call measured; ``None`` before the first one."""
        return self._current().last_run

    @property
    def fused(self) -> FusedReport | None:
        """How many ops of ``plan`` run as compiled kernels, or why none does; ``None`` for ``fuse="off"``."""
        fusion = self._current().fusion
        return fusion.report if fusion is not None else None

    @property
    def graphs(self) -> GraphReport | None:
        """How many ops of ``plan`` the latest call ran in CUDA graphs, or why none yet.

        ``None`` before the first call, for ``graphs="off"``, and where the machine has no GPU.
        """
        return self._current().graph_report

    @property
    def format_report(self) -> FormatReport:
        """The form that every weight of ``plan`` moves in, its bytes, and what it lost.

        Raises:
            StorageError: a weight file cannot be read.
        """
        from gascompile.precision.report import format_report

        bundle = self._current().bundle
        return format_report(bundle.program, bundle.weights)

    def measure_error(self, *args: Any, **kwargs: Any) -> MeasuredError:
        """Return how far the outputs are from those of the weights as stored, which run in the same budget.

        The plan for those is made at the first call and kept in the cache. Both runs get copies of the inputs and
        draw the same random numbers; buffers that calls change, and the random numbers to come, are put back.

        Raises:
            PlanMismatchError: the model was loaded from a bundle, which knows the rounded weights only; or the
                inputs are not as planned.
            InfeasiblePlanError: the budget is too small for the weights as they are stored.
            CheckpointError: the model wants another dtype than they are stored in.
        """
        from gascompile.precision.report import output_error

        plan_exact = self._exact
        if plan_exact is None:
            raise PlanMismatchError(
                "a bundle holds the weights as they move and no others; measure the error where the model is compiled"
            )
        bound_args, bound_kwargs = bind_call(self._positional, args, kwargs)
        leaves, spec = flatten_call(bound_args, bound_kwargs)

        def both() -> tuple[Any, ...]:
            unit = self._unit_for(leaves, spec, bound_args, bound_kwargs)
            self._last = unit
            exact_unit = plan_exact(bound_args, bound_kwargs)
            return tuple(self._run_unchanged(u, leaves) for u in (unit, exact_unit))

        with torch.random.fork_rng(devices=[]):
            found, exact = self._turn.take(both)
        return output_error(found, exact)

    def _run_unchanged(self, unit: Unit, leaves: list[Any]) -> Any:
        """Run a plan once in a session of its own; what this changes is as before."""
        self._close_session()
        before = {name: tensor.detach().clone() for name, tensor in unit.bundle.held.items()}
        on_host = device_of(unit.bundle.plan.machine).type == "cpu"
        try:
            with torch.random.fork_rng(devices=[] if on_host else None):
                outputs = self._activate(unit).run(*unit.given(copies(leaves))[0])
            found = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)
        finally:
            self._close_session()
            for name, tensor in unit.bundle.held.items():
                tensor.detach().copy_(before[name])
        return unflatten(found, unit.out_spec)

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """Buffers that calls mutate, by their name in the model. Writing to one changes the next call.

        A device mutates copies of them: the model's own follow when this is read, at ``save`` and at ``close``.
        """
        self._turn.take(self._pull_states)
        return self._current().bundle.held

    def _pull_states(self) -> None:
        if self._session is not None:
            self._session.pull_states()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a bundle: plan, program, current states; weights by reference and content hash.

        Weights that came from no file of yours are part of the bundle.

        Raises:
            StorageError: the folder cannot be written, or a weight file has changed.
        """
        from gascompile.bundles.check import note_checked

        self._turn.take(self._pull_states)
        bundle = self._current().bundle
        stamps = bundle.weights.stamps
        for stamp in stamps:
            require_unchanged(stamp)
        total_bytes = sum(stamp.size_bytes for stamp in stamps)
        with task("Hashing weights", total_bytes) as advance:
            hashed = tuple(content_stamp(stamp, advance) for stamp in stamps)
        weights = Weights(sources=bundle.weights.sources, stamps=hashed)
        spilled = [Path(stamp.path) for stamp in hashed if is_spilled(Path(stamp.path))]
        whole = replace(bundle, weights=weights)
        digest = write_bundle(whole, Path(folder), overwrite=True, enclose=spilled)
        note_checked(digest, self._cache_dir)

    def close(self) -> None:
        """Free the arena and close the weight files; calling the model again opens them again."""
        self._turn.take(self._close_session)

    def _close_session(self) -> None:
        self._executor = None
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._active = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = {unit.bundle.program.name for unit in self._units} or {"not planned yet"}
        return f"CompiledModel({', '.join(sorted(names))}, {len(self._units)} plan(s))"

    def _current(self) -> Unit:
        if self._last is None:
            raise PlanMismatchError(
                "nothing is planned yet: call the compiled model once, or pass example_inputs to compile"
            )
        return self._last

    def _activate(self, unit: Unit) -> Executor:
        # A child of a fork opens a session of its own.
        is_open = self._session is not None and self._session.is_open
        if self._active is unit and self._executor is not None and is_open:
            return self._executor
        self.close()
        early, unit.early = unit.early, None
        self._bar = LoadingBar("Loading resident weights")
        bundle = unit.bundle
        self._session = Session.for_plan(
            bundle.plan,
            sources=bundle.weights.sources,
            stamps=bundle.weights.stamps,
            states=bundle.held,
            progress=self._bar,
            early=early,
            spill_folder=self._cache_dir / "spill",
        )
        fused = unit.fusion.segments if unit.fusion is not None else ()
        self._executor = Executor(
            self._session,
            unit.graph_module,
            unit.bundle.plan,
            fused=fused,
            graphs=unit.graphs == "auto",
            counter=allocation_counter(self._cache_dir),
            on_exceed=self._on_exceed,
            from_file=self._exact is None,
        )
        self._active = unit
        return self._executor

    def _unit_for(
        self, leaves: list[Any], spec: pytree.TreeSpec, args: Args, kwargs: Kwargs
    ) -> Unit:
        misfits = []
        for unit in self._units:
            found = unit.misfit(leaves, spec)
            if found is None:
                return unit
            misfits.append(found)
        # Where only that differs a plan is made though shapes are given once and for all.
        near = min(misfits, key=lambda found: (not found.is_value, not found.is_near), default=None)
        prepare = self._prepare or (self._variant if near is not None and near.is_near else None)
        if prepare is None:
            assert near is not None
            raise PlanMismatchError(f"{near.reason}. {advice(near)}")
        if near is not None and near.is_value:
            _log.warning("%s: the model is captured again, as at each change of it", near.reason)
            # In the place of the one that is out of date: a value may change at every call.
            i = misfits.index(near)
            self._units[i] = unit = prepare(args, kwargs)
            return unit
        if near is not None and near.is_near:
            _log.info("%s: this call gets a plan of its own", near.reason)
        self._units.append(prepare(args, kwargs))
        return self._units[-1]
