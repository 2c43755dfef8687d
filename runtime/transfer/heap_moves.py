"""Moves of what lies on the heap: out and back while views of it stay valid and follow.

Memory is taken from and given to the tensor's storage. What outlives runs is moved by the store that holds it, what
ops make by the slots of the plan's own activations. Transfers may cross the end of a run: the next one waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from gascompile.core.errors import PlanMismatchError, StorageError, UnsupportedOpError
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.core.steps import Offload, Release, Reload, Wait
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.counting import Count
from gascompile.runtime.memory.heap_memory import LARGE_BYTES
from gascompile.runtime.memory.host_slots import HOST_BYTES, Outside, in_files
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.run_memory import RunMemory
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.memory.spill_slots import Slots, spill_slots
from gascompile.runtime.protocols import Device, Ticket
from gascompile.runtime.run.meter import LiveBytes
from gascompile.runtime.stores import Moves, Store
from gascompile.runtime.transfer.initial_residency import initial_residency

if TYPE_CHECKING:
    from gascompile.runtime.run.session import Session


OpenSpill = Callable[[Slots], Moves]
"""Makes room for activations of these sizes."""


class HeapMoves:
    """The tensors of one plan that move without a place in the arena."""

    def __init__(self, session: Session, plan: Plan) -> None:
        """Take the room for activations that leave.

        Raises:
            StorageError: there is not so much.
            PlanMismatchError: the session has no place for them.
        """
        tier = plan.machine.compute_tier
        self._budget_bytes = plan.budget_bytes.get(tier, 0)
        self._peak_bytes = plan.peak_bytes.get(tier, 0)
        taken = [t.size_bytes for t in plan.workload.tensors]
        taken += [op.workspace_bytes for op in plan.workload.ops]
        self._has_large = max(taken, default=0) >= LARGE_BYTES
        """Whether a run takes pages; where it does not, their limit is that of the run before."""
        self._device: Device = session.device
        self._store: Store | None = session.store
        self._memory: RunMemory | None = session.memory
        self._kept: Mapping[str, int] = self._store.sizes if self._store is not None else {}
        moved = [s for s in plan.steps if isinstance(s, (Offload, Reload)) and s.address is None]
        self.links = tuple(dict.fromkeys(step.link for step in moved))
        """Links that the moves go over."""
        sites = plan_sites(plan)
        between = sites.crossing if sites is not None else ()
        activations = [
            step
            for step in plan.steps
            if isinstance(step, (Offload, Reload, Wait))
            and step.address is None
            and not (step.tensor in self._kept or step.tensor in between)
        ]
        self._outside: Outside | None = None
        """Where a device's values are outside of its memory."""
        in_file = activations
        if not self._device.is_host and self._store is not None:
            self._outside = Outside.of(plan, self._kept, taken_bytes=HOST_BYTES)
            in_file = in_files(activations)
        self._spill = _room(session, plan, spill_slots(in_file)) if activations else None
        released = {step.tensor for step in plan.steps if isinstance(step, Release)}
        self._leaving = released.intersection(self._kept)
        self._away, self._ahead = initial_residency(plan, self._kept)
        self.tickets: dict[str, Ticket] = {}
        """What nobody has waited for yet, by tensor."""
        self._sizes: dict[str, int] = {}
        self._pending: dict[str, Ticket] = {}
        """What the last run has started for the next one."""
        self.live = LiveBytes()
        """What the run at hand has allocated."""
        self.count: Count | None = None
        """Of the run at hand, where the allocator counts."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path per link."""
        by = self._store or self._spill
        return {link: self._path(link, by.path) for link in self.links} if by is not None else {}

    def _path(self, link: str, path: str) -> str:
        if self._device.is_host:
            return path
        return "pinned memory" if HOST in link.split("->") else f"{path} through pinned memory"

    def begin(self, *, warm: bool) -> None:
        """Start a run; a cold one first brings about what the run before would have left."""
        self.count = None
        if warm:
            self.tickets, self._pending = self._pending, {}
        else:
            self.settle_all()
            self.tickets = {}
            self._sizes.clear()
            self._rest()
        if self._memory is not None and (self._has_large or not warm):
            self._memory.limit_pages(self._peak_bytes)
        for step in () if warm else self._ahead:
            self.tickets[step.tensor] = (
                self._write(step.tensor, step.link, None)
                if isinstance(step, Offload)
                else self._read(step.tensor, step.link, None)
            )
        self.live = LiveBytes(self._store.resident_bytes if self._store is not None else 0)

    def _rest(self) -> None:
        store, memory = self._store, self._memory
        if store is None:
            return
        store.write_out(self._leaving)
        if memory is not None:
            memory.limit_pages(self._peak_bytes)
        store.rest(self._away, self._outside)
        if memory is not None:
            memory.begin(self._budget_bytes - store.resident_bytes)

    def end(self) -> None:
        """Leave what is under way to the next run."""
        self._pending = self.tickets

    def settle_all(self) -> None:
        """Let no transfer be under way, so that something else may use the tensors.

        Raises:
            StorageError: one failed.
        """
        if self._spill is not None:
            self._spill.drain()
        try:
            for ticket in self._pending.values():
                ticket.wait()
                if ticket.event is not None:
                    ticket.event.wait()
        except StorageError:
            self._pending = {}
            raise
        # Not before: who is interrupted while waiting has to wait again.
        self._pending = {}

    def offload(self, tensor: str, link: str, value: torch.Tensor) -> int:
        """Start copying out; return the bytes."""
        size_bytes = value.untyped_storage().nbytes()
        if tensor in self._kept and self._store is not None:
            size_bytes = self._store.newer_bytes(tensor, link)
        self.tickets[tensor] = self._write(tensor, link, value)
        return size_bytes

    def _write(self, tensor: str, link: str, value: torch.Tensor | None) -> Ticket:
        after = self._device.mark()
        if tensor in self._kept:
            assert self._store is not None, "it keeps something"
            return self._store.write(tensor, link=link, after=after)
        assert self._spill is not None and value is not None, "there is a slot for what leaves"
        return self._spill.write(tensor, value.untyped_storage(), link=link, after=after)

    def reload(self, tensor: str, link: str, value: torch.Tensor) -> int:
        """Take memory and start copying back; return the bytes."""
        self.tickets[tensor] = self._read(tensor, link, value)
        return value.untyped_storage().nbytes()

    def _read(self, tensor: str, link: str, value: torch.Tensor | None) -> Ticket:
        after = self._device.mark()
        if tensor in self._kept:
            assert self._store is not None, "it keeps something"
            size_bytes = self._kept[tensor]
            self._make_room(size_bytes)
            ticket = self._store.read(tensor, link=link, after=after)
            self._adjust(tensor, size_bytes)
        else:
            if tensor not in self._sizes or self._spill is None or value is None:
                raise PlanMismatchError(
                    f"the plan brings '{tensor}' back, which never left; plan again"
                )
            size_bytes = self._sizes.pop(tensor)
            self._make_room(size_bytes)
            storage = value.untyped_storage()
            storage.resize_(size_bytes)
            ticket = self._spill.read(tensor, storage, link=link, after=after)
        self.live.take(tensor, size_bytes)
        return ticket

    def drop(self, tensor: str, value: torch.Tensor) -> None:
        """Give the memory back."""
        storage = value.untyped_storage()
        size_bytes = storage.nbytes()
        if tensor in self._kept:
            assert self._store is not None, "it keeps something"
            self._adjust(tensor, -size_bytes)
            self._store.drop(tensor)
        else:
            self._sizes[tensor] = size_bytes
            storage.resize_(0)
        self.live.drop(tensor, size_bytes)

    def _make_room(self, size_bytes: int) -> None:
        if self._memory is not None:
            self._memory.make_room(size_bytes)

    def _adjust(self, tensor: str, change_bytes: int) -> None:
        """Count what the store holds, where the allocator does not know it as this run's."""
        if self.count is None or self._store is None:
            return
        storage = self._store.tensors[tensor].untyped_storage()
        if not self.count.size_of(storage.data_ptr()):
            self.count.adjust(change_bytes)

    def close(self) -> None:
        """Give the room back; idempotent."""
        if self._spill is not None:
            self._spill.close()


def _room(session: Session, plan: Plan, slots: Slots) -> Moves:
    """Return new room for activations outside memory.

    Raises:
        StorageError: there is none.
        PlanMismatchError: the session was opened for none.
        UnsupportedOpError: this runtime moves none of the session's device.
    """
    if session.open_spill is not None:
        return session.open_spill(slots)
    if session.spill_folder is None:
        raise PlanMismatchError("the plan moves activations; open the session with a folder")
    if not isinstance(session.arena, Arena) or not session.device.is_host:
        raise UnsupportedOpError(
            f"the plan moves activations of the device '{session.device.name}', which this runtime does not do; "
            "plan for a larger budget or smaller example inputs"
        )
    # The plan's arena ends with the buffers of these moves.
    end = plan.arena_bytes[plan.machine.compute_tier]
    buffers = session.arena.memory[end - 2 * SPILL_BUFFER_BYTES : end]
    return Spill(session.spill_folder, slots, buffers)
