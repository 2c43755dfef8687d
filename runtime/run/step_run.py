"""One iteration under way: the values of its nodes, what of them is in memory, its transfers and their stalls.

What it takes is counted twice: by its own account, which knows names, and by the allocator, which knows all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gascompile.core.errors import BudgetExceededError, PlanMismatchError
from gascompile.core.reports import RunReport, Stall
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.runtime.memory.counting import Count
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.protocols import Instant, Ticket
from gascompile.runtime.run.counted_runs import budget_exceeded, log_excess
from gascompile.runtime.run.liveness import Entry
from gascompile.runtime.run.meter import process_peak_bytes

if TYPE_CHECKING:
    from gascompile.runtime.run.iteration import Iteration

_STALL_S = 1e-5
"""Shorter waits are the cost of looking."""


class Run:
    """The state of one iteration."""

    def __init__(self, of: Iteration, inputs: Sequence[Any], tickets: dict[str, Ticket]) -> None:
        self._of = of
        self._persistent = of._persistent
        self._num_changes = of._persistent.num_changes
        self._values: dict[fx.Node, Any] = {
            node: self._persistent.tensors[name] for node, name in of._bound.items()
        }
        self._values.update(zip(of._inputs, inputs, strict=True))
        self.tickets = tickets
        self._sizes: dict[str, int] = {}
        self._link_bytes: dict[str, int] = defaultdict(int)
        self._live: dict[str, int] = {
            name: size
            for name, size in self._persistent.sizes.items()
            if not self._persistent.is_away(name)
        }
        self.live_bytes = sum(self._live.values())
        """What persists and activations, as far as they are in memory; no workspace."""
        self.peak_bytes = self.live_bytes
        self.count: Count | None = None
        self._device = of.device
        self._spans: list[tuple[int, str, Instant, Instant]] = []

    def resident(self) -> frozenset[str]:
        """Return what persists and has memory."""
        persistent = self._persistent
        return frozenset(name for name in persistent.sizes if not persistent.is_away(name))

    def place(self, nodes: Collection[fx.Node]) -> None:
        """Bring inputs to where ops compute."""
        for node in nodes:
            value = self._values[node]
            if isinstance(value, torch.Tensor):
                self._values[node] = placed = self._device.place(value)
                self.live_bytes += placed.nbytes if placed is not value else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def start(self, steps: Sequence[Offload | Reload]) -> None:
        """Take the moves that an iteration before this one would have started."""
        for step in steps:
            self.move(step)
        self._link_bytes.clear()

    def steps(self, entries: Sequence[Entry]) -> None:
        """Take all steps in order."""
        for entry in entries:
            step = entry.step
            try:
                if isinstance(step, (Compute, Recompute)):
                    self.op(step, entry.nodes)
                else:
                    self.move(step)
            except torch.OutOfMemoryError as error:
                raise self._refused(step) or error from None
            if self._of.says_excess:
                self._look(step)
            for node in entry.frees:
                self._values.pop(node, None)
            for name in entry.dies:
                self.live_bytes -= self._live.pop(name, 0)
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Let go of one of an op's results; others of them may still be taken out of the list."""
        owner = self._of._owner.get(name)
        results = self._values.get(owner[0]) if owner is not None else None
        if owner is not None and owner[1] is not None and isinstance(results, list):
            results[owner[1]] = None

    def _look(self, step: Step) -> None:
        """Report the first step that passes the budget."""
        count = self.count
        if count is not None and count.peak_bytes > self._of.limit_bytes:
            self._of.says_excess = False
            log_excess(self._of._plan, step.op, count.peak_bytes - self.live_bytes)

    def _refused(self, step: Step) -> BudgetExceededError | None:
        """Return what passed the budget in a step, if that is what happened."""
        if self.count is None or not self.count.wanted_bytes:
            return None
        real_bytes = self.count.wanted_bytes - self.live_bytes
        changed = self._persistent.num_changes != self._num_changes
        return budget_exceeded(self._of._plan, step.op, real_bytes, half_updated=changed)

    def op(self, step: Compute | Recompute, nodes: Sequence[fx.Node]) -> None:
        """Run an op, and what has to be taken anew of its result."""
        number = step.source if isinstance(step, Recompute) else step.op
        op = self._of._plan.workload.ops[number]
        self._of.make_room(self._of.new_bytes[number])
        if isinstance(step, Compute):
            # Before the op: an interrupt in between leaves no new value that is taken for the old one.
            self._persistent.changed(self._of._changes[step.op])
        self._compute(nodes, op.name)
        for name in op.writes:
            self._born(name)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + op.workspace_bytes)

    def _compute(self, nodes: Sequence[fx.Node], name: str) -> None:
        values = self._values
        try:
            for node in nodes:
                assert callable(node.target)
                if node in self._of.flat:
                    args = [values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
                    found = node.target(*args)
                else:
                    positional, named = fx.node.map_arg(
                        (node.args, node.kwargs), values.__getitem__
                    )
                    found = node.target(*positional, **named)
                values[node] = list(found) if isinstance(found, tuple) else found
        except BaseException as error:
            error.add_note(f"while running op '{name}' of '{self._of._plan.workload.name}'")
            raise

    def _storage(self, name: str) -> torch.UntypedStorage:
        node, element = self._of._owner[name]
        value = self._values[node]
        tensor: torch.Tensor = value if element is None else value[element]
        return tensor.untyped_storage()

    def _born(self, name: str) -> None:
        if name in self._persistent.sizes or name not in self._of._owner:
            return
        node, element = self._of._owner[name]
        value = self._values[node] if element is None else self._values[node][element]
        if value is None:
            return
        size_bytes = value.untyped_storage().nbytes()
        if element is None and value.nbytes <= self._of.sizes[name] < size_bytes:
            # Some reductions return one element of all they have computed.
            self._values[node] = value.clone()
            size_bytes = self._values[node].untyped_storage().nbytes()
        self.live_bytes += size_bytes - self._live.get(name, 0)
        self._live[name] = size_bytes

    def move(self, step: Step) -> None:
        """Take a step that is no op."""
        match step:
            case Offload(tensor=name, link=link):
                self.tickets[name] = self._write(name, link)
                self._link_bytes[link] += step.size_bytes
            case Reload(tensor=name, link=link):
                self._of.make_room(step.size_bytes)
                self.tickets[name] = self._read(name, link)
                self._link_bytes[link] += step.size_bytes
            case Wait(tensor=name):
                self._wait(name, step.op)
            case Release(tensor=name):
                self._drop(name)
            case _:
                raise PlanMismatchError(f"a training plan holds {type(step).__name__}; plan again")

    def _write(self, name: str, link: str) -> Ticket:
        after = self._device.mark()
        if name in self._persistent.sizes:
            return self._persistent.write(name, link=link, after=after)
        return self._of._spill.write(name, self._storage(name), link=link, after=after)

    def _read(self, name: str, link: str) -> Ticket:
        after = self._device.mark()
        if name in self._persistent.sizes:
            ticket = self._persistent.read(name, link=link, after=after)
            size_bytes = self._persistent.sizes[name]
            self._adjust(name, size_bytes)
        else:
            storage, size_bytes = self._storage(name), self._sizes.pop(name)
            storage.resize_(size_bytes)
            ticket = self._of._spill.read(name, storage, link=link, after=after)
        self._live[name] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return ticket

    def _wait(self, name: str, op: int) -> None:
        ticket = self.tickets.pop(name, None)
        if ticket is None:
            return
        begun = self._device.clock()
        ticket.wait()
        if ticket.event is not None:
            self._device.hold(ticket.event)
        self._spans.append((op, name, begun, self._device.clock()))

    def _drop(self, name: str) -> None:
        if name in self._persistent.sizes:
            self._adjust(name, -self._persistent.sizes[name])
            self._persistent.drop(name)
        else:
            storage = self._storage(name)
            self._sizes[name] = storage.nbytes()
            storage.resize_(0)
        self.live_bytes -= self._live.pop(name, 0)

    def _adjust(self, name: str, change_bytes: int) -> None:
        """Count what persists, where the allocator does not know it as this run's."""
        storage = self._persistent.tensors[name].untyped_storage()
        if self.count is not None and not self.count.size_of(storage.data_ptr()):
            self.count.adjust(change_bytes)

    def outputs(self, nodes: Any) -> tuple[Any, ...]:
        """Return the values of the output."""
        found = tuple(self._values[node] for node in nodes)
        if self._device.is_host:
            return found
        return tuple(x.to("cpu", copy=True) if isinstance(x, torch.Tensor) else x for x in found)

    def report(self, time_s: float) -> RunReport:
        """Return what was measured; what compute was given is done by now."""
        plan, tier = self._of._plan, self._of._plan.machine.compute_tier
        waits = [(o, n, self._device.elapsed_s(begun, end)) for o, n, begun, end in self._spans]
        stalls = tuple(Stall(op=o, tensor=n, time_s=s) for o, n, s in waits if s > _STALL_S)
        counted = self._device.peak_bytes()
        peak_bytes = {tier: self.count.peak_bytes if self.count else counted or self.peak_bytes}
        moves = self._of.moves
        if moves is not None:
            peak_bytes[HOST] = moves.host_bytes
        return RunReport(
            seconds=time_s,
            peak_bytes=peak_bytes,
            peak_source="allocator" if self.count else "device" if counted else "planned workspace",
            link_bytes=dict(self._link_bytes),
            stall_s=sum(stall.time_s for stall in stalls),
            share_of_limit=plan.certificate.limit_s / time_s,
            paths={link: self._path(link) for link in self._link_bytes},
            stalls=stalls,
            process_peak_bytes=process_peak_bytes(),
        )

    def _path(self, link: str) -> str:
        moves = self._of.moves
        if moves is None:
            return self._persistent.path
        over_host = HOST in link.split("->")
        return "pinned memory" if over_host else f"{self._persistent.path} through pinned memory"
