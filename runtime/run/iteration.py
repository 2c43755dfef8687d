"""Executes a plan whose tensors live on the heap: activations that leave or are made again, states that stream.

The steps of the plan are turned into calls once. Between two of them values are found by their node; a value
is let go of after the last call that needs it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.core.steps import Offload, Release, Reload, Wait
from gascompile.runtime.devices.cpu import CpuDevice
from gascompile.runtime.memory.counting import NO_LIMIT, Count, Counter
from gascompile.runtime.memory.device_moves import HOST_BYTES, DeviceMoves
from gascompile.runtime.memory.heap_memory import HeapMemory, own_bytes
from gascompile.runtime.memory.host_slots import Outside, in_files
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.memory.spill_slots import spill_slots
from gascompile.runtime.protocols import Device, Ticket
from gascompile.runtime.run.liveness import Lives, at_rest, changes, new_bytes, owners
from gascompile.runtime.run.step_run import Run

if TYPE_CHECKING:
    from gascompile.runtime.run.recording import Recording


class Iteration:
    """A plan made executable on tensors that persist. Close it when it is not needed any more."""

    def __init__(
        self,
        graph: fx.Graph,
        plan: Plan,
        persistent: Persistent,
        bindings: Mapping[str, str],
        inputs: Sequence[str],
        *,
        folder: Path,
        buffers: memoryview,
        pages: Pages | None = None,
        counter: Counter | None = None,
        reserved_bytes: int = 0,
        stops: bool = True,
        moves: DeviceMoves | None = None,
        on_host: Collection[str] = (),
    ) -> None:
        """Turn the steps into calls and take room for the activations that leave.

        Args:
            graph: ops of the plan in their order; its output is a flat tuple.
            bindings: placeholder -> name in ``persistent``.
            inputs: the other placeholders, in the order of ``run``.
            pages: where large results are to lie; else on the heap.
            counter: what counts the memory that runs take; without one, planned workspace is believed.
            reserved_bytes: of the budget, for others than the ops.
            stops: whether a run ends before it passes the budget; else it says so afterwards.
            moves: of the device that computes; the host does, if ``None``.
            on_host: inputs that a device's ops take as they are.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
            PlanMismatchError: the plan is of another graph.
        """
        self._plan = plan
        self._persistent = persistent
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        if [node.name for node in self._nodes] != [op.name for op in plan.ops]:
            raise PlanMismatchError("the plan is of another program; plan again")
        self.flat = {node for node in self._nodes if _is_flat(node)}
        """Nodes whose arguments are nodes and constants, not lists with nodes in them."""
        self._bound = {
            node: bindings[node.name]
            for node in graph.nodes
            if node.op == "placeholder" and node.name in bindings
        }
        named = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._inputs = [named[name] for name in inputs]
        self._placed = {named[name] for name in inputs if name not in on_host}
        (self._outputs,) = graph.output_node().args
        self._owner = owners(self._nodes, plan)
        self._entries = Lives(self._nodes, plan, self._outputs, self._owner).entries()
        moved = [
            step
            for step in plan.steps
            if isinstance(step, (Offload, Reload, Wait)) and step.tensor not in persistent.sizes
        ]
        self._pages = pages
        self.moves = moves
        self.device: Device = CpuDevice() if moves is None else moves.device
        self._outside: Outside | None = None
        if moves is not None:
            self._outside = Outside.of(plan, persistent.sizes, taken_bytes=HOST_BYTES)
            moved = in_files(moved)
        self._spill = Spill(folder, spill_slots(moved), buffers, pages=pages, moves=moves)
        self._activate: Callable[[int], object] = bool if pages is None else pages.activate
        self.away, self._up_front = at_rest(plan, persistent.sizes)
        self._changes = changes(plan, persistent.sizes)
        released = {step.tensor for step in plan.steps if isinstance(step, Release)}
        self._dropped = released & set(persistent.sizes)
        self.sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
        self.heap = HeapMemory()
        self._budget_bytes = plan.budget_bytes[plan.machine.compute_tier]
        self._peak_bytes = plan.peak_bytes[plan.machine.compute_tier]
        self._counter, self.limit_bytes = counter, self._budget_bytes - reserved_bytes
        self._stops = stops
        self.says_excess = counter is not None and not stops
        """Whether the first op that passes the budget is still to be reported."""
        self.new_bytes = new_bytes(plan, persistent.sizes)
        self._pending: dict[str, Ticket] | None = None
        """Transfers that the last run has started for the next one; ``None`` before the first."""

    def run(
        self, inputs: Sequence[Any], recording: Recording | None = None
    ) -> tuple[tuple[Any, ...], RunReport]:
        """Run one iteration and return its outputs and what it took.

        Args:
            inputs: in the order of those that the iteration was made for.
            recording: what is to know when each step ran.

        Raises:
            BudgetExceededError: an op asked for more memory than the budget leaves; it was stopped before.
            StorageError: a transfer failed. Values that an update has changed stay changed.
        """
        start_s = time.perf_counter()
        pending, self._pending = self._pending, None
        self.device.begin()
        if pending is None:
            self._begin()
        make = Run if recording is None else recording.run
        run = make(self, inputs, pending or {})
        self._limit_pages()
        grad, set_grad = torch.is_grad_enabled(), torch._C._set_grad_enabled
        autocast, set_autocast = torch.is_autocast_enabled("cpu"), torch.set_autocast_enabled
        activate = self._activate
        # A recorded run keeps to the account that its picture is drawn from.
        counting = self._counting(run) if recording is None else contextlib.nullcontext()
        # No contexts, whose exits an interrupt may keep from coming to this.
        try:
            try:
                try:
                    set_grad(False)
                    # The graph has the casts of an autocast in it; updates are to have none.
                    set_autocast("cpu", False)
                    activate(1)
                    with counting as run.count:
                        limit = bool if run.count is None else run.count.limit
                        try:
                            limit(self.limit_bytes if self._stops else NO_LIMIT)
                            run.place(self._placed)
                            if pending is None:
                                run.start(self._up_front)
                            run.steps(self._entries)
                        finally:
                            limit(NO_LIMIT)
                finally:
                    activate(0)
            finally:
                set_autocast("cpu", autocast)
        finally:
            set_grad(grad)
        self._pending = run.tickets
        outputs = run.outputs(self._outputs)
        return outputs, run.report(time.perf_counter() - start_s)

    def _counting(self, run: Run) -> contextlib.AbstractContextManager[Count | None]:
        if self._counter is None:
            return contextlib.nullcontext()
        return self._counter.counting(live_bytes=run.live_bytes)

    def _begin(self) -> None:
        """Bring about what an iteration before the first one would have left."""
        self._persistent.write_out(self._dropped)
        self._limit_pages()
        activate = self._activate
        try:
            activate(1)
            self._persistent.rest(self.away, self._outside)
        finally:
            activate(0)
        self.heap.give_back()
        self.heap.begin(own_bytes() - self._persistent.resident_bytes + self._budget_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Be about to take memory; pages have no holes, but small values beside them may leave some."""
        if self._pages is None:
            self.heap.make_room(size_bytes)
        else:
            self.heap.keep_within(size_bytes)

    def _limit_pages(self) -> None:
        if self._pages is None:
            return
        # What is not in blocks of pages was taken by now: small values, and the holes between them.
        beside_bytes = own_bytes() - self._pages.resident_bytes
        room_bytes = self.heap.limit_bytes - beside_bytes
        self._pages.limit(min(room_bytes, self._peak_bytes))

    def settle(self) -> None:
        """Let no transfer be under way, so that something else may use the tensors; the next run starts afresh."""
        self._spill.drain()
        try:
            for ticket in (self._pending or {}).values():
                ticket.wait()
                if ticket.event is not None:
                    ticket.event.wait()
        except StorageError:
            self._pending = None
            raise
        # Not before: who is interrupted while waiting has to wait again.
        self._pending = None

    def close(self) -> None:
        """Give the file of the activations back, and the heap's holes; idempotent."""
        self.heap.end()
        if self._pages is not None:
            self._pages.trim()
        self._spill.close()


def _is_flat(node: fx.Node) -> bool:
    inside: list[fx.Node] = []
    rest = tuple(arg for arg in node.args if not isinstance(arg, fx.Node))
    fx.node.map_arg((rest, node.kwargs), inside.append)
    return not (inside or node.kwargs)
