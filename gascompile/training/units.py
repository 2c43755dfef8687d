"""Units: what runs for one kind of batch, captured, planned and made executable, over values that all share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from gascompile.bundles import plan_cache
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.reuse import CachedPlan
from gascompile.codegen.allocator_library import allocation_counter, page_memory
from gascompile.core.budget import Budget
from gascompile.core.collection import no_collection
from gascompile.core.config import CompileConfig
from gascompile.core.errors import (
    BudgetExceededError,
    FormatError,
    InfeasiblePlanError,
    PlanVerificationError,
)
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.progress import task
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.machines.resolve import profile_of
from gascompile.machines.run_within_budget import log_replan
from gascompile.machines.stale_profile import Grader
from gascompile.passes.graph.insert import insert
from gascompile.passes.graph.leaving import other_sites
from gascompile.runtime.devices import device_for
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.device_values import DeviceValues
from gascompile.runtime.memory.early_memory import map_anonymous
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from gascompile.training.capture.joint import Joint, capture_joint
from gascompile.training.capture.requirements import require_followed
from gascompile.training.capture.shapes import with_shapes
from gascompile.training.capture.traced_call import call_of
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.optimizers.unplanned import state_bytes
from gascompile.training.planning.step_costs import ExchangeTime, costed_workload, remember
from gascompile.training.planning.step_plan import step_plan
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.settings import Settings, require_known
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.file_values import FileValues
from gascompile.training.state.train_state import States, Total
from gascompile.training.step_cache import (
    PlannedStep,
    bound_step,
    bundle_of,
    place_of_step,
    rules_of,
    with_kernels,
)
from gascompile.training.step_session import on_device, open_session
from gascompile.training.unit import Unit

OPEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose values a step has."""
_BUFFERS = 4
"""Parts of the transfer buffers: out and in, of what persists and of activations."""


def require_free(model: nn.Module) -> None:
    """Refuse a model whose values a step has.

    Raises:
        ValueError: one has.
    """
    for tensor in model.parameters():
        if (cover := vars(tensor).get("_cover")) is not None:
            cover.settle()
    if model in OPEN:
        said = "the model belongs to another training step that is open; close that one first"
        raise ValueError(said)


class Saved(Protocol):
    """Plans that take the place of captures and planning; see ``SavedPlans``."""

    def find(self, place: CachedPlan) -> Bundle:
        """Return the plan for a kind of batch, and let ``place`` know what it depends on."""
        ...

    def check(self, made: PlannedStep) -> None:
        """Return if a plan was made for its program."""
        ...


class UnitMaker:
    """Makes the units of one model and optimizer, and has what they share."""

    transfer_bytes = _BUFFERS * SPILL_BUFFER_BYTES
    """Of the budget, for transfers."""

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
        values: FileValues | None,
        saved: Saved | None = None,
    ) -> None:
        """Change nothing yet."""
        self._model, self._loss_fn, self.optimizer = model, loss_fn, optimizer
        self._budget, self._machine, self._config = budget, machine, config
        self._settings, self._values, self._saved = settings, values, saved
        self.before_access: Callable[[], None] = lambda: None
        """Called before a value is read or written from outside."""
        self.settle: Callable[[], object] = bool
        """Blocks while values go back into the model, whose asker was interrupted."""
        self.total: Total | None = None  # over the ranks of the step
        self.exchange_s: ExchangeTime | None = None
        self.states: States | None = None
        """Values that were taken over, from the first unit on."""
        self.session: Session | None = None
        """What all units run in, from the first one on."""
        self._storages: Storages | None = None
        self._buffers = map_anonymous(self.transfer_bytes)
        self._moves: DeviceMoves | None = None
        """Of the device, from the first unit on; the host has none."""
        self._reserved_bytes = self.transfer_bytes if machine.compute_tier == HOST else 0
        # What stands for the memory of an emulated device is the host's, too.
        self._in_ram = machine.compute_backend != "cuda"
        limit_bytes = budget.limits_bytes(machine)[machine.compute_tier]
        self.pages = page_memory(config.cache_dir, limit_bytes) if self._in_ram else None

    def make(self, batch: Any, options: StepOptions) -> Unit:
        """Capture and plan what is run for batches like this one; take the values over at the first time.

        Raises:
            CaptureError: the loss cannot be traced, or depends on no parameter.
            InfeasiblePlanError: the budget is too small; names the smallest feasible one.
            StorageError: a file cannot be written.
        """
        model = type(self._model).__name__
        does = "step" if options.trains else "call" if options.calls else "evaluation"
        name = f"{does} of {model}"
        require_followed(self._model, self.optimizer, self._settings.layout)
        if self._values is not None:
            self._values.enter()
        storages = self._storages = self._storages or Storages(self._model)
        with no_collection():
            place, made = self._looked_up(batch, options, storages)
        entry = "" if made is None or self._saved is not None else place.folder.name
        if made is None:
            made = self._planned(name, batch, options, storages, place)
        program, plan = made.program, made.plan
        states = self._own(made.rules, program, made.tensors, accumulates=options.accumulates)
        graph_module = insert(on_device(program, self._moves), plan)
        made, basis, fusion = with_kernels(place, made, graph_module, self._config)
        executor = Executor(
            self._session_over(states),
            graph_module,
            plan,
            fused=fusion.segments if fusion is not None else (),
            graphs=self._config.graphs == "auto",
            counter=allocation_counter(self._config.cache_dir) if self._in_ram else None,
            on_exceed=self._settings.on_exceed,
            on_host=[spec.name for spec in program.program.inputs[-program.num_groups :]],
        )
        return Unit(
            program=program,
            plan=plan,
            graph_module=graph_module,
            executor=executor,
            trains=options.trains,
            calls=options.calls,
            grader=Grader(
                plan,
                partial(profile_of, self._machine, self._config.cache_dir),
                saved_s=fusion.report.gain_s if fusion is not None else 0.0,
            ),
            basis=basis,
            bundle=made.bundle,
            fused=fusion.report if fusion is not None else None,
            place=place,
            entry=entry,
        )

    def _session_over(self, states: States) -> Session:
        """Return the session of all units, which is opened with the first one."""
        if self.session is None:
            self.session = open_session(
                states.persistent,
                folder=self._config.cache_dir / "training",
                buffers=memoryview(self._buffers)[2 * SPILL_BUFFER_BYTES :],
                pages=self.pages,
                moves=self._moves,
                in_ram=self._in_ram,
                reserved_bytes=self._reserved_bytes,
            )
        return self.session

    def _looked_up(
        self, batch: Any, options: StepOptions, storages: Storages
    ) -> tuple[CachedPlan, PlannedStep | None]:
        """Return the place of a step in the cache, and what is kept there."""
        own = self._model, self.optimizer, storages, self._settings
        look = partial(
            place_of_step,
            self._model,
            self._traced(options),
            self.optimizer,
            batch,
            options,
            storages=storages,
            settings=self._settings,
            machine=self._machine,
            budget=self._budget,
            config=self._config,
            has_pages=self.pages is not None,
        )
        place = with_shapes(self.states, storages, look)
        # Outside, as what is compared may lead to values that are not in memory.
        saved = self._saved
        bundle = place.read(self._outdated) if saved is None else saved.find(place)
        if bundle is None:
            return place, None
        with task("Reading the plan"):
            try:
                found = with_shapes(self.states, storages, lambda: bound_step(place, bundle, *own))
            except (PlanVerificationError, FormatError) as error:
                if self._saved is not None:
                    raise
                place.refuse(error)
                return place, None
            if self._saved is not None:
                self._saved.check(found)
        return place, found

    def _traced(self, options: StepOptions) -> LossFunction:
        return call_of if options.calls else self._loss_fn

    def _planned(
        self, name: str, batch: Any, options: StepOptions, storages: Storages, place: CachedPlan
    ) -> PlannedStep:
        """Capture a step and plan it."""
        model, trains, traced = self._model, options.trains, self._traced(options)

        def captured() -> tuple[StepProgram, Rules, Joint]:
            joint = capture_joint(
                model, traced, batch, storages, trains=trains, calls=options.calls
            )
            trained = list(joint.gradients) if trains else []
            rules = rules_of(self.optimizer, joint.tensors, storages, trained, self._settings)
            return step_program(joint, rules, name=name, options=options), rules, joint

        with task(f"Capturing a {name}"):
            program, rules, joint = with_shapes(self.states, storages, captured)
        with task("Planning"):
            plan = self._plan(program, place.prints)
        bundle, _ = bundle_of(program, plan, place.printed)
        return PlannedStep(
            program=program,
            plan=plan,
            rules=rules,
            tensors=dict(joint.tensors),
            bundle=bundle,
            record=joint.record,
        )

    def _outdated(self, bundle: Bundle) -> str:
        if bundle.fusion is None:
            return ""
        from gascompile.codegen.fuse import outdated

        return outdated(bundle, cache_dir=self._config.cache_dir)

    def learns(self, unit: Unit, error: BudgetExceededError) -> bool:
        """Keep what a stopped run of ``unit`` has taught for the next plan; False where it taught nothing."""
        if self._saved is not None:
            return False
        if unit.entry:
            # Its ops are known by name alone: a capture will tell what kind the one is of.
            plan_cache.remove(self._config.cache_dir, unit.entry)
            return True
        if not remember(unit.program.program, error, self._config.cache_dir):
            return False
        log_replan(error)
        return True

    def _plan(self, program: StepProgram, prints: Mapping[str, str]) -> Plan:
        sites = other_sites(self._machine) if self._config.sites == "all" else ()
        workload = costed_workload(
            program,
            self._machine,
            self._budget,
            cache_dir=self._config.cache_dir,
            pages=self.pages,
            sites=sites,
            exchange_s=self.exchange_s,
        )

        def found(reserved_bytes: int) -> Plan:
            return step_plan(
                workload,
                self._machine,
                self._budget,
                self._config,
                fingerprint=prints,
                reserved_bytes=self._reserved_bytes + reserved_bytes,
            )

        state = state_bytes(self.optimizer) if self._settings.unplanned else 0
        try:
            return found(state)
        except InfeasiblePlanError:
            if not state or self.states is None:
                raise
            # Steps go on beyond the budget, with a warning, once the optimizer has made its state: so does the rest.
            return found(0)

    def _own(
        self,
        rules: Rules,
        program: StepProgram,
        tensors: Mapping[str, torch.Tensor],
        *,
        accumulates: bool,
    ) -> States:
        """Take parameters, buffers and moments over at the first plan; what changes later gets a slot by then."""
        changing = program.program.states | program.gradients
        if self.states is None:
            assert self._storages is not None, "a capture has looked at them"
            self._open_device()
            self.states = States(
                self._model,
                rules,
                tensors,
                storages=self._storages,
                tiles=rules.tiles(accumulates=accumulates),
                keep=self._kept,
                values=self._values,
                changing=changing | rules.trained,
                before_access=self.before_access,
                settle=self.settle,
                total=self.total,
            )
            OPEN.add(self._model)
            return self.states
        require_known({*tensors, *program.tiles}, self.states.persistent.sizes)
        self.states.persistent.take_slots(changing)
        return self.states

    def _kept(
        self,
        tensors: Mapping[str, torch.Tensor],
        zeros: Mapping[str, tuple[int, torch.dtype]],
        unread: Collection[str],
        sources: SourceSlots | None,
    ) -> Persistent:
        """Take values over, into the memory of what computes and slots outside of it."""
        folder, pages, moves = self._config.cache_dir / "training", self.pages, self._moves
        if moves is not None:
            return DeviceValues(
                tensors, zeros, folder, moves, pages, unread=unread, sources=sources
            )
        buffers = memoryview(self._buffers)[: 2 * SPILL_BUFFER_BYTES]
        return Persistent(tensors, zeros, folder, buffers, pages, unread=unread, sources=sources)

    def _open_device(self) -> None:
        """Let there be what moves values of the device, where that is not the host; once."""
        if self._machine.compute_tier == HOST or self._moves is not None:
            return
        device = device_for(self._machine)
        try:
            self._moves = DeviceMoves(device)
        except BaseException:
            device.close()
            raise

    def leave(self) -> None:
        """Let the model be as it was, unless it has been taken over."""
        if self.states is not None:
            return
        if self._moves is not None:
            self._moves.close()
            self._moves = None
        if self._storages is not None:
            self._storages.restore()
            self._storages = None
        if self._values is not None:
            self._values.leave()
