"""Units: what runs for one kind of batch, captured, planned and made executable, over values that all share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gascompile.codegen.allocator_library import allocation_counter
from gascompile.core.collection import no_collection
from gascompile.core.huge_pages import map_anonymous
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.core.waiting import Turn
from gascompile.machines.resolve import profile_of
from gascompile.machines.stale_profile import Grader
from gascompile.passes.graph.insert import insert
from gascompile.runtime.devices import device_for
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.device_values import DeviceValues
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from gascompile.training.capture.requirements import require_followed
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.planning.step_program import StepOptions, StepProgram
from gascompile.training.settings import require_known
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.left_gradients import drop_zeros, require_none_left
from gascompile.training.state.train_state import States
from gascompile.training.step_cache import with_kernels
from gascompile.training.step_job import StepJob
from gascompile.training.step_planner import StepPlanner
from gascompile.training.step_session import on_device, open_session
from gascompile.training.unit import StepUnit

OPEN: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnitMaker]] = weakref.WeakKeyDictionary()
"""Models whose values a step has, and who made its units."""


def require_free(model: nn.Module) -> None:
    """Refuse a model whose values a step has.

    Raises:
        ValueError: one has.
    """
    for tensor in model.parameters():
        if (cover := vars(tensor).get("_cover")) is not None:
            cover.settle()
    if (maker := OPEN.get(model, lambda: None)()) is not None:
        # All values may be back, and who puts them back not yet done.
        maker.settle()
    if model in OPEN:
        said = "the model belongs to another training step that is open; close that one first"
        raise ValueError(said)


class UnitMaker(StepPlanner):
    """Makes the units of one model and optimizer, and has what they share."""

    def __init__(self, job: StepJob) -> None:
        """Change nothing yet."""
        super().__init__(job)
        self.turn = Turn()
        """Of all that runs, reads or writes values."""
        self.before_access: Callable[[], None] = lambda: None
        """Called before a value is read or written from outside."""
        self.settle: Callable[[], object] = bool
        """Blocks while values go back into the model, whose asker was interrupted."""
        self.session: Session | None = None
        """What all units run in, from the first one on."""
        self._storages: Storages | None = None
        self._buffers = map_anonymous(self.transfer_bytes)
        self._moves: DeviceMoves | None = None
        """Of the device, from the first unit on; the host has none."""

    def make(self, batch: Any, options: StepOptions) -> StepUnit:
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
        if self.states is None:
            require_none_left(self._model, self.optimizer)
        if self._values is not None:
            self._values.enter()
        storages = self._storages = self._storages or Storages(self._model)
        place, made = self.planned(name, batch, options, storages)
        is_kept = made.record is None and self._saved is None
        program, plan = made.program, made.plan
        states = self._own(made.rules, program, made.tensors, accumulates=options.accumulates)
        with no_collection():
            graph_module = insert(on_device(program, self._moves), plan)
            made, basis, fusion = with_kernels(place, made, graph_module, self._config)
            executor = Executor(
                self._session_over(states),
                graph_module,
                plan,
                fused=fusion.segments if fusion is not None else (),
                graphs=self._config.graphs == "auto",
                counter=allocation_counter(self._config.cache_dir) if self._in_ram else None,
                on_exceed=self._config.on_exceed,
                on_host=[spec.name for spec in program.program.inputs[-program.num_groups :]],
            )
        return StepUnit(
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
                waits=self.pipeline is not None,
            ),
            basis=basis,
            bundle=made.bundle,
            fused=fusion.report if fusion is not None else None,
            place=place,
            entry=place.folder.name if is_kept else "",
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
        assert self._storages is not None, "a capture has looked at them"
        updated = program.gradients & rules.trained
        self._storages.require_writable(program.program.states | updated)
        if self._values is not None:
            self._values.require_frozen(changing)
        if self.states is None:
            drop_zeros(self._model, self.optimizer, program.gradients)
            self._storages.leave_shared()
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
                turn=self.turn,
                total=self.ranks.total if self.ranks is not None else None,
            )
            OPEN[self._model] = weakref.ref(self)
            return self.states
        needed = {*tensors, *program.tiles} - self.states.divided.keys()
        require_known(needed, self.states.persistent.sizes)
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
