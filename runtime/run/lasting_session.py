"""Lasting sessions: of plans that move weights and states, whose values a store has while the session is open.

Weights are read where they lie. A state is taken out of the caller's tensor, and whoever reads or writes it meanwhile
does so through the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.huge_pages import map_anonymous
from gascompile.core.machine import IoSettings
from gascompile.core.own_work import OwnWork
from gascompile.core.plan import Plan
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.core.waiting import life, require_life
from gascompile.runtime.devices import device_for
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.device_values import DeviceValues
from gascompile.runtime.memory.lasting import (
    TakenStates,
    has_own_memory,
    require_own_memory,
    unread_weight,
)
from gascompile.runtime.memory.lasting_accounts import (
    TRANSFER_BYTES,
    lasting_names,
    resident_states,
)
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.run_memory import RunMemory
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.memory.storages import without_memory
from gascompile.runtime.run.session import Session

Result = TypeVar("Result")


class LastingSession(Session):
    """A session of one plan that moves what lasts."""

    def __init__(
        self,
        plan: Plan,
        *,
        sources: Mapping[str, WeightSource],
        stamps: tuple[FileStamp, ...],
        states: Mapping[str, torch.Tensor],
        folder: Path,
        pages: Pages | None,
        in_ram: bool = True,
    ) -> None:
        """Take the states that move over: the caller's tensors of them have no memory from here on.

        Args:
            sources: where weights lie.
            stamps: what their files looked like when they were planned on.
            states: the caller's.
            folder: where a file takes what leaves memory.
            pages: where large values lie; else on the heap.
            in_ram: whether what ops take is the host's memory.

        Raises:
            DeviceError: memory of the host cannot be pinned.
            PlanMismatchError: a weight has no file, a state no value.
            StorageError: a file cannot be had or has changed.
            UnsupportedOpError: a state's memory is not its own.
        """
        weights, moved = lasting_names(plan)
        missing = sorted((weights - sources.keys()) | (moved - states.keys()))
        if missing:
            raise PlanMismatchError(
                f"the plan moves '{missing[0]}', for which there is no value; plan again"
            )
        for name in sorted(moved):
            require_own_memory(name, states[name])
        # One way to read them for all, where that is possible.
        moved |= {name for name in resident_states(plan) if has_own_memory(states[name])}
        outlines = {name: unread_weight(sources[name]) for name in sorted(weights)}
        empty = {
            n: torch.empty(like.shape, dtype=like.dtype)
            for n, like in outlines.items()
            if not like.numel()
        }
        outlines = {name: like for name, like in outlines.items() if name not in empty}
        outlines |= {name: states[name].detach().to("meta") for name in sorted(moved)}
        sizes = {name: like.untyped_storage().nbytes() for name, like in outlines.items()}
        buffers = memoryview(map_anonymous(TRANSFER_BYTES))
        half = 2 * SPILL_BUFFER_BYTES
        moves = _device_moves(plan)
        slots = SourceSlots({name: sources[name] for name in weights - empty.keys()}, stamps)
        store = _store(outlines, sizes, folder, buffers[:half], pages, slots, moves)
        self.taken = TakenStates(store, states, sorted(moved))
        on_host = moves is None
        try:
            super().__init__(
                arena_bytes=0,
                residents={},
                sources={name: source for name, source in sources.items() if name not in sizes},
                states={**{n: t for n, t in states.items() if n not in sizes}, **empty},
                io=plan.machine.io if on_host else IoSettings(num_threads=1),
                open_spill=partial(Spill, folder, buffers=buffers[half:], pages=pages, moves=moves),
                store=store,
                memory=RunMemory(pages) if in_ram else None,
                reserved_bytes=TRANSFER_BYTES if on_host else 0,
                device=moves.device if moves is not None else None,
            )
        except BaseException:
            self.taken.close()
            raise
        # An own thread takes the states and gives them back: an interrupt in between would lose values.
        self.keeper = OwnWork("gascompile-states", self)
        self._take()

    def _take(self) -> None:
        self._parts.taken = self.taken
        self._parts.keeper = self.keeper
        self.keeper.when_dropped = self._parts.close_here
        try:
            self.keeper.do(self.taken.take)
        except BaseException:
            self.close()
            raise

    def _run(self, user: object, body: Callable[[bool], Result]) -> Result:
        if self.is_open:
            self.keeper.wait()
            self.taken.make_whole()
            self.taken.store.require_sources()
        self.taken.is_whole = False
        result = super()._run(user, body)
        self.taken.store.require_read()
        self.taken.is_whole = True
        return result

    def state(self, name: str) -> torch.Tensor:
        """Return a copy of a state that was taken over.

        Raises:
            ForkedError: the session is of another process.
            StorageError: it cannot be read.
        """

        def value() -> torch.Tensor:
            if self._is_ending():
                return self.taken.tensors[name].detach().clone()
            return self._drained_store().value(name)

        return self._turn.take(value)

    def assign_state(self, name: str, value: torch.Tensor) -> None:
        """Give a state that was taken over another value; raises as ``state`` does."""

        def assign() -> None:
            if self._is_ending():
                self.taken.tensors[name].detach().copy_(value)
                return
            store = self._drained_store()
            # The next run brings about what the plan expects of it.
            self._user, self._is_drained = None, True
            self.keeper.do(partial(store.assign, name, value))

        self._turn.take(assign)

    def end(self) -> None:
        """Give the states back, and everything else."""
        if self.is_open:
            self._drained_store()
        super().end()

    def _is_ending(self) -> bool:
        """Return whether somebody has begun to close this, and was interrupted; the states are back then."""
        if self._life is not life() or self.is_open:
            return False
        self.end()
        return True

    def _drained_store(self) -> Persistent:
        """Return what has the states, with nothing under way."""
        require_life(self._life, "the session that has the model's states")
        self.keeper.wait()
        self.taken.make_whole()
        try:
            for heap in self.heaps:
                heap.settle_all()
        except StorageError:
            self._user, self.taken.is_whole = None, False
            self.taken.make_whole()
        return self.taken.store


def _device_moves(plan: Plan) -> DeviceMoves | None:
    """Return what moves values of the device that a plan is for; the host has none."""
    if plan.machine.compute_tier == HOST:
        return None
    device = device_for(plan.machine)
    try:
        return DeviceMoves(device)
    except BaseException:
        device.close()
        raise


def _store(
    outlines: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    folder: Path,
    buffers: memoryview,
    pages: Pages | None,
    sources: SourceSlots,
    moves: DeviceMoves | None,
) -> Persistent:
    """Return what has tensors of these layouts, all of which begin away."""
    unread = tuple(outlines)
    if moves is not None:
        return DeviceValues(outlines, {}, folder, moves, pages, unread=unread, sources=sources)
    return Persistent(
        {name: without_memory(like) for name, like in outlines.items()},
        {},
        folder,
        buffers,
        pages,
        unread=unread,
        sources=sources,
        sizes=sizes,
    )
