"""What the executors of one model share: device, arena, resident weights, states, open files.

Two plans for two input shapes can run on one session, and so within one budget: they agree on the size
of the arena and on the addresses of the resident weights, and take turns with the rest of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import torch

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.plan import Plan
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.core.steps import Offload
from gascompile.core.tiles import parse_tile
from gascompile.core.waiting import Turn, life, require_life
from gascompile.runtime.devices import device_for
from gascompile.runtime.devices.cpu import CpuDevice
from gascompile.runtime.memory.device_states import DeviceStates
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.memory.pinned import host_first_use, pinned_bytes, require_budget
from gascompile.runtime.memory.run_memory import RunMemory
from gascompile.runtime.memory.staging import Staging
from gascompile.runtime.protocols import (
    Device,
    Event,
    HostMemory,
    Memory,
    Reader,
    Sharer,
    Ticket,
    read_at,
)
from gascompile.runtime.run.parts import RunParts
from gascompile.runtime.stores import Store
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.heap_moves import HeapMoves, OpenSpill
from gascompile.runtime.transfer.host_weights import HostWeights
from gascompile.runtime.transfer.read_plan import Landing
from gascompile.runtime.transfer.reading import open_engine
from gascompile.runtime.transfer.residents import (
    Progress,
    Residents,
    check_residents,
    first_uses,
    resident_addresses,
)
from gascompile.runtime.transfer.rows import tile_source, weight_view

Result = TypeVar("Result")


class Session:
    """Memory, files and reading threads of a compiled model; close it, or use it in ``with``.

    States are the caller's tensors; a device mutates copies of them, see ``DeviceStates``. All else is owned.
    """

    _rows: HostMemory | None = None
    _user: object = None

    def __init__(
        self,
        *,
        arena_bytes: int,
        residents: Mapping[str, int],
        sources: Mapping[str, WeightSource],
        stamps: tuple[FileStamp, ...] = (),
        states: Mapping[str, torch.Tensor] | None = None,
        io: IoSettings | None = None,
        first_use: Mapping[str, int] | None = None,
        link: str = "nvme->cpu",
        progress: Progress | None = None,
        reader: Reader = read_at,
        early: EarlyMemory | None = None,
        spill_folder: Path | None = None,
        open_spill: OpenSpill | None = None,
        store: Store | None = None,
        memory: RunMemory | None = None,
        reserved_bytes: int = 0,
        device: Device | None = None,
    ) -> None:
        """Open the files and start to load the resident weights.

        Args:
            arena_bytes: exact size of the memory for resident and streamed weights.
            residents: arena address of each weight that stays.
            sources: where each weight, resident or streamed, lies.
            stamps: what the files looked like when they were planned on.
            states: tensors that ops mutate.
            io: threads and chunk size of the reads.
            first_use: op that first reads a resident; smaller ones are loaded first.
            link: the link that resident weights come over, for reports.
            progress: told about the loading of resident weights.
            reader: the low-level read.
            early: memory that was taken ahead for this arena.
            spill_folder: where activations go that leave memory for a while, through buffers at the arena's end.
            open_spill: makes room for them elsewhere.
            store: holds tensors that outlive runs and move; whoever opened it closes it.
            memory: where ops take theirs; by default from torch's allocator as it is.
            reserved_bytes: of every plan's budget, for others than ops.
            device: what computes, by default the CPU; the session closes it.

        Raises:
            DeviceError: the device has not the memory that is asked for.
            StorageError: a file is missing or has changed.
        """
        io = io or IoSettings()
        self._life, self.device = life(), device or CpuDevice()
        self.addresses, self.sources = dict(residents), dict(sources)
        self.link = link
        check_residents(self.addresses, self.sources)
        used = [e.path for source in self.sources.values() for e in source.extents]
        self._files = SourceFiles(used, stamps)
        try:
            self.arena = self.device.arena(arena_bytes, early)
            self.kept = self._keep(states or {})
            self._io = io
            self._landings: dict[str, Landing] = {}
            landings = {name: self.landing(name) for name in self.addresses}
            self._pinned: list[Memory] = []
            self.stagings: list[Staging] = []
            at = (self.device, self.arena, self._files, io, self.stagings)
            self.engine = open_engine(*at, reader=reader, pinned=self._pinned)
        except BaseException:
            self.device.close()
            self._files.close()
            raise
        self.host = HostWeights(self.device, self.engine, "nvme->cpu", self._pinned)
        self.spill_folder, self.open_spill, self.store = spill_folder, open_spill, store
        self.memory, self._reserved_bytes = memory, reserved_bytes
        # Bound to the parts, not to the session: a session that is dropped is shut down too.
        self._parts = RunParts(
            self.kept, self.engine, self._files, self.device, [self.arena], self._pinned
        )
        self.heaps, self.lanes = self._parts.heaps, self._parts.lanes
        self.unpin = self._parts.unpin
        self._shut_down = weakref.finalize(self, self._parts.close)
        self._turn, self.sharers = Turn(), weakref.WeakSet[Sharer]()
        # Before the first run only resident weights are on their way: there is nothing to drain.
        self._closed, self._is_drained = False, True
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._residents = Residents(
            self.engine,
            landings,
            self.addresses,
            first_use=first_use or {},
            link=link,
            progress=progress,
        )
        self._residents.start()

    @classmethod
    def for_plan(
        cls,
        plan: Plan,
        *,
        sources: Mapping[str, WeightSource],
        stamps: tuple[FileStamp, ...] = (),
        states: Mapping[str, torch.Tensor] | None = None,
        progress: Progress | None = None,
        reader: Reader = read_at,
        early: EarlyMemory | None = None,
        spill_folder: Path | None = None,
        memory: RunMemory | None = None,
        device: Device | None = None,
    ) -> Self:
        """Open a session of the size and with the resident weights of ``plan``.

        The arguments are those of the constructor; ``device`` is by default the one of the plan's machine.
        """
        require_budget(plan, pinned_bytes(plan))
        tier = plan.machine.compute_tier
        into = sorted(plan.machine.links_into(tier), key=lambda link: link.source_tier != "nvme")
        return cls(
            arena_bytes=plan.arena_bytes.get(tier, 0),
            residents=resident_addresses(plan),
            sources=sources,
            stamps=stamps,
            states=states,
            io=plan.machine.io,
            first_use=first_uses(plan),
            link=into[0].name if into else f"nvme->{tier}",
            progress=progress,
            reader=reader,
            early=early,
            spill_folder=spill_folder,
            memory=memory,
            device=device or device_for(plan.machine),
        )

    def _keep(self, states: Mapping[str, torch.Tensor]) -> DeviceStates:
        try:
            return DeviceStates(self.device, states)
        except torch.OutOfMemoryError as error:
            raise self.device.out_of_memory(f"{len(states)} states", error) from error

    def source(self, tensor: str) -> WeightSource:
        """Return where a weight, or a tile of one, lies.

        Raises:
            PlanMismatchError: there is no file for it.
        """
        tile = parse_tile(tensor) if tensor not in self.sources else None
        if tile is not None and tile.base in self.sources:
            return tile_source(self.sources[tile.base], tile)
        if tensor not in self.sources:
            raise PlanMismatchError(f"the plan streams '{tensor}', for which there is no file")
        return self.sources[tensor]

    def landing(self, tensor: str) -> Landing:
        """Return the reads that bring a weight or a tile; made once."""
        if tensor not in self._landings:
            self._landings[tensor] = self._files.landing(self.source(tensor), self._io)
        return self._landings[tensor]

    def view(self, tensor: str, address: int) -> torch.Tensor:
        """Return the weight ``tensor`` as it lies in the reservation at ``address``; made once."""
        key = (tensor, address)
        if key not in self._views:
            source = self.source(tensor)
            offset = address + self.landing(tensor).shift_bytes
            self._views[key] = weight_view(self.arena, offset, source)
        return self._views[key]

    def heap_moves(self, plan: Plan) -> HeapMoves | None:
        """Return what moves the heap's tensors of ``plan``; ``None`` where they all stay.

        Raises:
            StorageError: there is no room for them outside memory.
        """
        if self.store is None and not any(isinstance(step, Offload) for step in plan.steps):
            return None
        heap = HeapMoves(self, plan)
        self.heaps.append(heap)
        return heap

    @property
    def fixed_bytes(self) -> int:
        """Of a budget, what is not for ops: the arena, states, what others have of it."""
        return self.arena.size_bytes + self.kept.size_bytes + self._reserved_bytes

    def hold(self, plan: Plan) -> None:
        """Read the weights whose home is the host's memory into pinned memory, those of other plans excepted.

        Raises:
            DeviceError: so much memory cannot be pinned, or it is more than the plan's budget for the host.
        """
        if not self.device.is_host:
            held = self.store.tensors if self.store is not None else {}
            first_use = {n: op for n, op in host_first_use(plan).items() if n not in held}
            self.host.add({name: self.landing(name) for name in first_use}, first_use)
            require_budget(plan, self.pinned_bytes)

    def submit(
        self, tensor: str, address: int, *, key: int, link: str, after: Event | None
    ) -> Ticket:
        """Start to bring a weight to ``address`` of the arena, whose reservation is free after an event."""
        landing = self.landing(tensor)
        if not link.startswith("cpu->") or tensor not in self.host:
            return self.engine.submit(landing, address, key=key, link=link, after=after)
        start = address + landing.shift_bytes
        target = self.arena.bytes(start, start + landing.size_bytes)
        return self.host.submit(tensor, target, self.device.stream(link), after)

    def row_buffer(self, size_bytes: int) -> HostMemory:
        """Return pinned memory of at least ``size_bytes``, one for all plans: their runs take turns."""
        if self._rows is None or self._rows.size_bytes < size_bytes:
            self._rows = self.pin(size_bytes)
        return self._rows

    def pin(self, size_bytes: int) -> HostMemory:
        """Take pinned memory, which the session has until it is closed; raises ``DeviceError``."""
        self._pinned.append(memory := self.device.pinned(size_bytes))
        return memory

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the device copies from."""
        return sum(memory.size_bytes for memory in self._pinned)

    @property
    def host_bytes(self) -> int:
        """Host memory that is taken for a device: pinned memory, and what the store has there."""
        return self.pinned_bytes + (self.store.host_bytes if self.store is not None else 0)

    def resident(self, tensor: str) -> torch.Tensor:
        """Return a state or the view of a resident weight, whether or not its bytes are there yet."""
        if self.store is not None and tensor in self.store.tensors:
            return self.store.tensors[tensor]
        if tensor in self.kept.tensors:
            return self.kept.tensors[tensor]
        if tensor not in self.addresses:
            if tensor in self.host:  # an op on the host reads it where it lies
                return weight_view(*self.host.place(tensor), self.source(tensor))
            raise PlanMismatchError(f"the session has neither weight nor state '{tensor}'")
        return self.view(tensor, self.addresses[tensor])

    def pending(self, tensor: str) -> Ticket | None:
        """Return the ticket of a resident weight that nobody has awaited yet."""
        return self._residents.pending(tensor)

    def settle(self, tensor: str) -> None:
        """Note that a resident weight has been awaited."""
        self._residents.settle(tensor)

    @property
    def is_loaded(self) -> bool:
        """Whether every resident weight has been awaited."""
        return self._residents.complete

    @property
    def is_open(self) -> bool:
        """Whether this process opened it, not one that this was forked from, and nobody has begun to close it."""
        return self._life is life() and not self._closed

    def pull_states(self, written: Collection[str] | None = None) -> None:
        """Bring the caller's states, or those that the latest run wrote to, up to date with what runs made of them."""
        self._turn.take(partial(self.kept.pull, written))

    def run(self, user: object, body: Callable[[bool], Result]) -> Result:
        """Hold the session for one run of ``user``; ``body`` is told whether its prefetches are still under way.

        Whatever ends a run but its last line leaves the session cold: the next run starts afresh.

        Raises:
            ForkedError: the session is of another process.
            StorageError: the session is closed, or a weight file is not what it was, before or after the run.
        """
        return self._turn.take(partial(self._run, user, body))

    def _run(self, user: object, body: Callable[[bool], Result]) -> Result:
        require_life(self._life, "the session")
        if self._closed:
            raise StorageError("the session is closed; compile or load the model again")
        self._files.check()
        self.kept.push()
        warm = self._user is user
        restart = not warm and not self._is_drained
        self._user, self._is_drained = None, False
        try:
            if restart:
                self._restart()
            result = body(warm)
            self._files.recheck()
        except BaseException:
            self._drain()
            raise
        self._user = user
        return result

    def _drain(self) -> None:
        """Cancel what is queued and block until nothing moves any more."""
        self._parts.end_lanes(self.engine.drain)
        if self.store is not None:
            self.store.drain()
        self.host.forget()
        self.device.synchronize()

    def _restart(self) -> None:
        self._drain()
        self._residents.forget_failed()
        self._residents.start()
        self.host.start()

    def leave(self, user: object) -> None:
        """Let the next run start afresh, where the last one was of ``user`` and nothing of it is under way."""
        if self._user is user:
            self._user, self._is_drained = None, True

    def close(self) -> None:
        """Stop the reads, close the files and give the memory back; idempotent, to be repeated if interrupted."""
        self._turn.take(self.end)

    def end(self) -> None:
        """Do what ``close`` does, whoever has the turn: it may wait for the caller."""
        self._closed = True
        self._user = None
        self._views.clear()
        if self.memory is not None:
            self.memory.end()
        self._parts.close()
        self._shut_down.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
