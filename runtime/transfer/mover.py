"""Carries out the moves of one plan: which staged copy is on its way, how long its users waited for it.

The bytes of a move count when an op takes delivery of them, so that each iteration of a warm executor
counts the plan's bytes per link exactly, however far the reads have run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gascompile.core.errors import StorageError
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Prefetch, Wait
from gascompile.runtime.debug.races import COMPUTE, tensors_in
from gascompile.runtime.memory.arena import POISON
from gascompile.runtime.memory.counting import Count
from gascompile.runtime.protocols import Event, Instant, Ticket
from gascompile.runtime.run.meter import LiveBytes
from gascompile.runtime.run.session import Session
from gascompile.runtime.transfer.crossings import Crossings
from gascompile.runtime.transfer.dues import due_ops, fetches_ahead
from gascompile.runtime.transfer.gather import RowReader
from gascompile.runtime.transfer.half_way import HalfWay


class PlanMover:
    """The ``moves.Mover`` of a plan on a session.

    An executor calls the ``*_at`` methods, which know the op they stand at. The methods of the protocol
    serve a graph that is run directly; there a ``wait`` whose prefetch was never issued reads by itself.
    """

    def __init__(self, session: Session, plan: Plan, *, overlap: bool, paranoid: bool) -> None:
        self._session = session
        self._device = session.device
        self._races = session.device.races if paranoid else None
        self._ops = plan.ops
        self._overlap = overlap
        self._paranoid = paranoid
        self._iteration = 0
        self._staged: dict[tuple[str, int], Ticket] = {}
        self._delivered: set[tuple[str, int]] = set()
        self._links: dict[str, str] = {}
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._due: dict[tuple[str, int], int] = {}
        self._wrapped: list[tuple[Prefetch, int]] = []
        for step, due in due_ops(plan):
            self._links[step.tensor] = step.link
            if due >= len(plan.ops):
                self._wrapped.append((step, due - len(plan.ops)))
        for wait in plan.steps:
            if isinstance(wait, Wait) and wait.address is not None:
                key = (wait.tensor, wait.address)
                self._views[key] = session.view(*key)
                self._due.setdefault(key, wait.op)
        self._wrapped.sort(key=lambda pair: pair[1])
        self._half_way = HalfWay.of(session, plan)
        self._ahead = fetches_ahead(plan)
        sites = plan_sites(plan)
        self.crossings: Crossings | None = None
        if sites is not None:
            self.crossings = Crossings(plan, sites, session)
        session.hold(plan)
        self._rows = RowReader(session, plan)
        has_heap = sites is None or session.store is not None
        self._heap = session.heap_moves(plan) if has_heap else None
        self._store = session.store
        self._kept_storages: frozenset[int] = frozenset(
            tensor.untyped_storage()._cdata
            for tensor in (self._store.tensors.values() if self._store is not None else ())
        )
        self.live = LiveBytes()
        """What the run at hand has allocated."""
        self._stalled: list[tuple[int, str, Instant, Instant]] = []
        self.link_bytes: dict[str, int] = {}
        self.copied_bytes = 0
        """Bytes of the outputs that had to be copied, as they lay in a weight or a state."""
        self._reset_report()

    # ------------------------------------------------------------ one iteration

    def begin(self, *, warm: bool) -> None:
        """Start an iteration; a cold one first issues what the iteration before would have."""
        self._reset_report()
        self._iteration += 1
        self.live = LiveBytes()
        if self._heap is not None:
            self._heap.begin(warm=warm)
            self.live = self._heap.live
        if warm:
            return
        self._iteration = 0
        self._staged.clear()
        self._delivered.clear()
        if self._half_way is not None:
            self._half_way.forget()
        if self._paranoid:
            self._poison_streamed()
        for fetch, op in self._ahead:
            self.fetch_at(op % len(self._ops), fetch.tensor, fetch.link, fetch.place, fetch.address)
        for step, op in self._wrapped:
            self.prefetch_at(op, step.tensor, step.link, step.address)

    @property
    def meetings(self) -> Crossings:
        """The copies between the sites of a plan that has several."""
        assert self.crossings is not None, "the plan has several sites"
        return self.crossings

    def counts(self, count: Count) -> None:
        """Let the moves of the run at hand be part of what ``count`` counts."""
        if self._heap is not None:
            self._heap.count = count

    def end(self) -> None:
        """End an iteration that went well: what it has started for the next one goes on."""
        if self._heap is not None:
            self._heap.end()

    def settle_all(self) -> None:
        """Let nothing be under way that an iteration has started for the next one; see ``HeapMoves``."""
        if self._heap is not None:
            self._heap.settle_all()

    @property
    def tickets(self) -> dict[str, Ticket]:
        """The moves of the heap's tensors that nobody has waited for yet, by tensor."""
        crossing = self.crossings.tickets if self.crossings is not None else {}
        return {**(self._heap.tickets if self._heap is not None else {}), **crossing}

    def close(self) -> None:
        """Give back what the plan alone has taken; idempotent."""
        if self._heap is not None:
            self._heap.close()
        if self._half_way is not None:
            self._half_way.close()
            self._half_way = None
        # Others of the session stay.
        self._session.heaps[:] = [h for h in self._session.heaps if h is not self._heap]

    @property
    def stalls(self) -> list[Stall]:
        """What ops waited for in this iteration; on a device with its own clock, known once it is synchronous."""
        stalls = (
            Stall(op=op, tensor=tensor, time_s=self._device.elapsed_s(start, stop))
            for op, tensor, start, stop in self._stalled
        )
        return [stall for stall in stalls if stall.time_s > 0]

    def _reset_report(self) -> None:
        self._stalled = []
        self.copied_bytes = 0
        links = self._heap.links if self._heap is not None else ()
        rows = self._rows.links
        hops = self._half_way.links if self._half_way is not None else ()
        self.link_bytes = dict.fromkeys(
            (self._session.link, *self._links.values(), *links, *rows, *hops), 0
        )
        if self.crossings is not None:
            self.crossings.begin(self.link_bytes, self._stalled)

    @property
    def heap_paths(self) -> Mapping[str, str]:
        """The I/O path of the links that tensors of the heap move over."""
        return self._heap.paths if self._heap is not None else {}

    def fetch_at(self, due: int, tensor: str, link: str, place: str, address: int) -> None:
        """Queue a read to the place in between, of which something that op ``due`` waits for is pushed on."""
        del place
        assert self._half_way is not None, "the session knows the plan"
        key = self._iteration * len(self._ops) + due
        landing = self._session.landing(tensor)
        self._half_way.fetch(landing, address, key=key, link=link, is_now=self._overlap)

    def evict(self, tensor: str, place: str, address: int) -> None:
        """Give up what is in between; in a paranoid run its bytes are spoiled, once it has left."""
        del place, address
        assert self._half_way is not None, "the session knows the plan"
        self._half_way.evict(tensor, spoil=self._paranoid)

    def fetch(self, tensor: str, link: str, place: str, address: int) -> None:
        """Start to read a tensor to the place in between; returns at once."""
        self.fetch_at(0, tensor, link, place, address)

    def prefetch_at(self, due: int, tensor: str, link: str, address: int) -> None:
        """Queue a read that op ``due`` of this iteration waits for."""
        key = (tensor, address)
        self._end_copy(key)
        if self._overlap:
            self._staged[key] = self._submit(due, tensor, link, address)

    def wait_at(self, op: int, tensor: str, address: int) -> torch.Tensor:
        """Block until the newest prefetch has arrived; the time counts as a stall of ``op``."""
        key = (tensor, address)
        if key in self._delivered:
            return self._views[key]
        link = self._links.get(tensor, self._session.link)
        ticket = self._staged.get(key)
        if ticket is None:
            ticket = self._submit(op, tensor, link, address)
        self._await(ticket, op, tensor)
        self._delivered.add(key)
        self._count(link, tensor)
        if self._half_way is not None and (feed := self._half_way.newly_had(tensor, link)):
            self._count(feed, tensor)
        return self._views[key]

    def _end_copy(self, key: tuple[str, int]) -> None:
        self._staged.pop(key, None)
        self._delivered.discard(key)

    def resident_at(self, op: int, tensor: str) -> torch.Tensor:
        """Block until a resident weight, which may still be loading, has arrived."""
        ticket = self._session.pending(tensor)
        if ticket is not None:
            self._await(ticket, op, tensor)
            self._session.settle(tensor)
            self._count(self._session.link, tensor)
        return self._session.resident(tensor)

    def gather_at(self, op: int, tensor: str, indices: torch.Tensor) -> torch.Tensor:
        """Read the rows of a weight that ``indices`` names and return them in its shape.

        Every row counts as often as it is asked for, as planned.

        Raises:
            IndexError: the weight has no such row.
        """
        key = self._iteration * len(self._ops) + op
        await_it = partial(self._await, op=op, tensor=tensor)
        rows = self._rows.read(tensor, indices, key=key, wait=await_it)
        self.link_bytes[self._rows.link(tensor)] += rows.nbytes
        return rows

    def out_of_arena(self, value: object) -> object:
        """Return ``value``, copied where it is a tensor in the arena."""
        if isinstance(value, torch.Tensor) and self._session.arena.contains(value):
            return self._copy(value)
        return value

    def own(self, value: object) -> object:
        """Return ``value``, copied where it is a tensor in the arena or in a state."""
        if isinstance(value, torch.Tensor) and (
            self._session.kept.contains(value)
            or value.untyped_storage()._cdata in self._kept_storages
        ):
            return self._copy(value)
        return self.out_of_arena(value)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._races is not None:
            self._reads(tensor, "the copy of an output")
        copied = tensor.clone()
        self.copied_bytes += copied.untyped_storage().nbytes()
        return copied

    def _count(self, link: str, tensor: str) -> None:
        size_bytes = self._session.landing(tensor).size_bytes
        self.link_bytes[link] += size_bytes

    def _submit(self, due: int, tensor: str, link: str, address: int) -> Ticket:
        key = self._iteration * len(self._ops) + due
        # Whoever used the reservation before has been given to compute by now: its release precedes this.
        after = self._device.mark()
        if self._half_way is not None and self._half_way.has(tensor, link):
            return self._push(tensor, address, link, after)
        return self._session.submit(tensor, address, key=key, link=link, after=after)

    def _push(self, tensor: str, address: int, link: str, after: Event | None) -> Ticket:
        """Copy from the place in between; without overlap it is read to there only now."""
        assert self._half_way is not None, "the session knows the plan"
        landing = self._session.landing(tensor)
        start = address + landing.shift_bytes
        target = self._session.arena.bytes(start, start + landing.size_bytes)
        return self._half_way.push(tensor, target, self._device.stream(link), after)

    def _await(self, ticket: Ticket, op: int, tensor: str) -> None:
        """Block until the bytes are on their way, and let compute wait for them to be there."""
        event = ticket.event if ticket.done else None
        stalled = not ticket.done or (event is not None and not event.reached)
        start = self._device.clock() if stalled else None
        try:
            ticket.wait()
        except StorageError as error:
            name = self._ops[op].name if op < len(self._ops) else "output"
            raise StorageError(f"op '{name}' did not get '{tensor}': {error}") from error
        if ticket.event is not None:
            self._device.hold(ticket.event)
        if stalled:
            self._stalled.append((op, tensor, start, self._device.clock()))

    # ------------------------------------------------------------ paranoid runs

    def watched(self, function: Callable[..., Any], op: str) -> Callable[..., Any]:
        """Return ``function`` with its reads of the arena checked, in a paranoid run on a watched device."""
        if self._races is None:
            return function

        def call(*values: Any) -> Any:
            for tensor in tensors_in(values):
                self._reads(tensor, f"op '{op}'")
            return function(*values)

        return call

    def _reads(self, tensor: torch.Tensor, what: str) -> None:
        assert self._races is not None
        name = self._name_at(tensor) if self._session.arena.contains(tensor) else "an activation"
        self._races.access(COMPUTE, tensor, writes=False, name=name, what=what)

    def _name_at(self, tensor: torch.Tensor) -> str:
        """Return the weight whose view shares the memory of ``tensor``."""
        start = tensor.data_ptr()
        for (name, _), view in self._views.items():
            if view.data_ptr() <= start < view.data_ptr() + max(view.nbytes, 1):
                return name
        return "a resident weight"

    def _spoil(self, start: int, stop: int, name: str) -> None:
        if start >= stop:
            return
        if self._races is not None:
            memory = self._session.arena.bytes(start, stop)
            self._races.access(COMPUTE, memory, writes=True, name=name, what="a release")
        self._session.arena.fill(start, stop, POISON)

    def _poison_streamed(self) -> None:
        start = 0
        for name, address in sorted(self._session.addresses.items(), key=lambda item: item[1]):
            self._spoil(start, address, "what is not there yet")
            start = address + reserve_bytes(self._session.landing(name).size_bytes)
        self._spoil(start, self._session.arena.size_bytes, "what is not there yet")

    # ------------------------------------------------------------ moves.Mover

    def gather(self, tensor: str, indices: torch.Tensor) -> torch.Tensor:
        """Read the rows of a weight that ``indices`` names."""
        return self.gather_at(0, tensor, indices)

    def resident(self, tensor: str) -> torch.Tensor:
        """Return the view of a weight or state that stays."""
        return self.resident_at(0, tensor)

    def prefetch(self, tensor: str, link: str, address: int) -> None:
        """Start moving a tensor; returns at once."""
        self.prefetch_at(self._due[tensor, address], tensor, link, address)

    def wait(self, tensor: str, address: int) -> torch.Tensor:
        """Block until a tensor is at ``address`` and return the view of it."""
        return self.wait_at(self._due[tensor, address], tensor, address)

    def offload(self, tensor: str, link: str, value: torch.Tensor) -> None:
        """Start copying out what lies on the heap; returns at once."""
        assert self._heap is not None, "the session knows the plan"
        self.link_bytes[link] += self._heap.offload(tensor, link, value)

    def reload(self, tensor: str, link: str, value: torch.Tensor) -> None:
        """Take memory for it and start copying it back; returns at once."""
        assert self._heap is not None, "the session knows the plan"
        self.link_bytes[link] += self._heap.reload(tensor, link, value)

    def send(self, tensor: str, link: str, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to another site."""
        return self.meetings.copied(tensor, link, value)

    def settle(self, tensor: str) -> None:
        """Block until it is out or back."""
        if self.crossings is None or tensor not in self.crossings:
            self.settle_at(0, tensor)

    def settle_at(self, op: int, tensor: str) -> None:
        """Block until it is out or back; the time counts as a stall of ``op``."""
        assert self._heap is not None, "the session knows the plan"
        if (ticket := self._heap.tickets.get(tensor)) is not None:
            self._await(ticket, op, tensor)
            del self._heap.tickets[tensor]

    def drop(self, tensor: str, value: torch.Tensor) -> None:
        """Give back the memory of what is out, or will be computed again."""
        assert self._heap is not None, "the session knows the plan"
        self._heap.drop(tensor, value)

    def release(self, tensor: str, address: int) -> None:
        """Give a staged copy up; in a paranoid run its bytes are spoiled, so that a late reader shows."""
        self._end_copy((tensor, address))
        if self._paranoid:
            landing = self._session.landing(tensor)
            start = address + landing.shift_bytes
            self._spoil(start, start + landing.size_bytes, tensor)
