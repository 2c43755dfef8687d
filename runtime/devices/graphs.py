"""Graphs of a device in place of single launches: the ops between two moves are given to it in one call.

The first run of an input signature goes op by op and tells which steps a graph can hold; the next one captures
each group of such steps and replays it at once; later ones replay. All graphs share one pool of memory:

* Every run replays every graph, in the order of capture. So memory that one graph's tensors had may be taken
  by a later graph once those are gone, as it is op by op: no run reads it before it has written it again.
* What a step outside of graphs reads, and what the program returns, stays referenced from its capture on:
  nobody takes its memory, and it is the same tensor in every run. The caller gets copies.
* What a graph reads and each run makes anew, inputs above all, is copied to memory that stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.reports import GraphReport
from gascompile.core.sizes import format_size
from gascompile.runtime.devices.graph_groups import (
    Group,
    divide,
    interpret,
    more_bytes,
    pool_bytes,
)
from gascompile.runtime.devices.graph_replay import Entries, Replay
from gascompile.runtime.devices.graph_rules import makes_memory, tensors_in, value_reason
from gascompile.runtime.protocols import Graphs
from gascompile.runtime.run.schedule import RunSchedule, RunStep
from gascompile.runtime.run.session import Session
from gascompile.runtime.run.sharers import make_room

_log = logging.getLogger(__name__)

Value = Any
Signature = tuple[object, ...]

_NOT_YET = "graphs are captured at the second call with the same shapes"
_CHECKS = 2
"""Runs with graphs whose peak is compared with the budget: equal ones follow."""
_OP_BY_OP, _SURVEY, _CAPTURE, _REPLAY = "op by op", "survey", "capture", "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What the runs of one signature replay."""

    signature: Signature
    schedule: RunSchedule
    num_graphs: int
    num_ops: int


class GraphRuns:
    """Decides for each run of an executor which steps it takes: single ops, captures, or replays.

    ``begin`` comes before a run; ``done`` after it or, where it was not completed, ``undone``.
    """

    def __init__(
        self, session: Session, plan: Plan, schedule: RunSchedule, on_host: Collection[str] = ()
    ) -> None:
        """Capture nothing yet; inputs ``on_host`` stay where they are."""
        self._session = session
        self._device = session.device
        self._plan = plan
        self._plain, self._on_host = schedule, frozenset(on_host)
        self._mode = _OP_BY_OP
        self._reason = _NOT_YET
        self._at_hand: tuple[Signature, list[tuple[torch.Tensor, int]]] = ((), [])
        self._surveyed: Signature | None = None
        self._refused: dict[int, str] = {}
        self._copying: set[int] = set()
        """Steps that may return what they read as it lies, and made a copy."""
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._graphs: Graphs | None = None
        self._entries: Entries | None = None
        self._replays: dict[int, Replay] = {}
        self._parts: list[Group | RunStep] = []
        self._captured: _Captured | None = None
        self._addresses: list[tuple[torch.Tensor, int]] = []
        """Where a store has what graphs read: others that share it may move that."""
        self._checks = 0
        session.sharers.add(self)

    # ------------------------------------------------------------ around a run

    @property
    def report(self) -> GraphReport:
        """How many ops run in how many graphs, or why none does."""
        captured = self._captured
        return GraphReport(
            num_ops=captured.num_ops if captured is not None else 0,
            num_graphs=captured.num_graphs if captured is not None else 0,
            num_all_ops=len(self._plan.ops),
            reason="" if captured is not None else self._reason,
        )

    @property
    def held_bytes(self) -> int:
        """What graphs keep of the device's memory from run to run."""
        if self._graphs is None or self._entries is None:
            return 0
        return self._graphs.most_bytes + self._entries.size_bytes

    def give_back(self) -> None:
        """Give the graphs back; they are captured again when runs follow."""
        self._drop()

    @property
    def live_bytes(self) -> int:
        """Peak of the activations of a run with graphs, as the run before the capture counted them; else 0."""
        return self._live_bytes if self._mode in (_CAPTURE, _REPLAY) else 0

    def begin(self, inputs: Sequence[Value]) -> RunSchedule:
        """Return the steps that the run of ``inputs`` takes."""
        signature, self._mode = _signature(inputs), _OP_BY_OP
        if any(tensor.data_ptr() != address for tensor, address in self._addresses):
            self._drop()
        is_same = self._captured is not None and self._captured.signature == signature
        make_room(self._session, self._plan, but=self if is_same else None)
        self._at_hand = (signature, [(x, _version(x)) for x in tensors_in(inputs)])
        if self._captured is not None:
            if self._captured.signature != signature:
                return self._plain
            self._mode = _REPLAY
            return self._captured.schedule
        if self._reason != _NOT_YET:
            return self._plain
        if self._surveyed == signature:
            return self._begin_capture()
        self._mode, self._surveyed = _SURVEY, None
        return self._survey()

    def place(self, values: list[Value], inputs: Sequence[Value]) -> int | None:
        """Put the inputs of a run with graphs into their slots and return their bytes; ``None`` for other runs."""
        if self._mode not in (_CAPTURE, _REPLAY):
            return None
        assert self._entries is not None, "a capture has begun"
        taken_bytes = 0
        for (name, slot), value in zip(self._plain.inputs, inputs, strict=True):
            values[slot] = value
            if isinstance(value, torch.Tensor) and name not in self._on_host:
                values[slot] = self._entries.input(slot, value)
                taken_bytes += value.nbytes
        return taken_bytes

    def own(self, value: Value) -> Value:
        """Return an output, copied where a later run writes to its memory."""
        if self._entries is not None and isinstance(value, torch.Tensor):
            return value.clone() if self._entries.owns(value) else value
        return value

    def done(self, live_peak_bytes: int) -> None:
        """Take note that the run at hand is complete. Graphs that need more than the budget are given up."""
        if self._mode == _SURVEY:
            self._live_bytes = live_peak_bytes
            self._end_survey()
        elif self._mode == _CAPTURE:
            self._end_capture()
        if self._mode in (_CAPTURE, _REPLAY) and self._checks < _CHECKS:
            self._checks += 1
            self._keep_budget(0, "with graphs a run takes")
        self._at_hand = ((), [])

    def undone(self) -> None:
        """Take note that the run at hand was not completed: what it captured is captured anew."""
        self._at_hand = ((), [])
        if self._mode == _CAPTURE:
            self._drop()

    # ------------------------------------------------------------ the run before the capture

    def _survey(self) -> RunSchedule:
        self._refused.clear()
        self._copying.clear()
        steps = [
            step._replace(function=partial(self._observe, i, step.function))
            for i, step in enumerate(self._plain.steps)
        ]
        return replace(self._plain, steps=tuple(steps))

    def _observe(self, i: int, function: Any, *values: Value) -> Value:
        """Make a step, and note what its values say against a graph."""
        result = function(*values)
        step, arena = self._plain.steps[i], self._session.arena
        if not step.trait.launches and makes_memory(values, result):
            self._copying.add(i)
        reason = value_reason(step.trait, values, result, self._device.torch_device)
        if reason and not step.trait.host:
            self._refused[i] = reason
        made = [t for t in tensors_in((result,)) if not arena.contains(t)]
        self._sizes[step.result] = sum(t.nbytes for t in made)
        return result

    def _end_survey(self) -> None:
        self._surveyed, inputs = self._at_hand
        if any(_version(tensor) != version for tensor, version in inputs):
            self._stop("an op writes to an input", warn=False)
            return
        here = self._device.torch_device.type
        more = sum(x.nbytes for x, _ in inputs if x.device.type == here)
        more += sum(self._sizes.get(slot, 0) for slot in set(self._plain.outputs))
        parts = divide(self._plain, self._refused, self._copying)
        more += more_bytes(parts, self._sizes)
        if any(isinstance(part, RunStep) and part.trait.num_ops for part in parts):
            # Products between graphs work in memory of their own.
            machine = self._plan.machine
            more += machine.library_bytes(machine.compute_tier)
        if self._session.store is not None:
            # What moves has its peak at another time than what graphs keep throughout.
            more += pool_bytes(parts, self._sizes)
            more += max((op.workspace_bytes for op in self._plan.workload.ops), default=0)
        # Graphs may keep at once what ops have one after the other, for which the plan's own peak is the bound.
        planned = self._plan.peak_bytes.get(self._plan.machine.compute_tier, 0)
        self._keep_budget(more, "with graphs a run would take", least_bytes=planned)

    # ------------------------------------------------------------ the run of the capture

    def _begin_capture(self) -> RunSchedule:
        self._parts = divide(self._plain, self._refused, self._copying)
        graphs = self._device.graphs()
        if graphs is None or not any(isinstance(p, Group) and p.launches for p in self._parts):
            self._stop(
                f"the device '{self._device.name}' has no graphs"
                if graphs is None
                else "no op can be part of a graph",
                warn=False,
            )
            return self._plain
        self._mode, self._graphs, self._checks = _CAPTURE, graphs, 0
        self._entries, self._replays = Entries(graphs, self._session.arena), {}
        graphs.begin()
        return self._with_groups(self._capture)

    def _with_groups(self, function: Any) -> RunSchedule:
        """Return the schedule in which each group is one call of ``function`` on its number and all slots."""
        unused = len(self._plain.slots)
        steps = [
            RunStep(partial(function, i), _all_slots, unused, None, part.frees, part.steps[0].op)
            if isinstance(part, Group)
            else part
            for i, part in enumerate(self._parts)
        ]
        return replace(self._plain, steps=tuple(steps), slots=(*self._plain.slots, None))

    def _capture(self, i: int, values: list[Value]) -> None:
        """Capture a group and replay it; run it op by op where it or one before it cannot be captured."""
        group = self._parts[i]
        assert isinstance(group, Group) and self._graphs is not None and self._entries is not None
        if self._reason != _NOT_YET:
            interpret(group.steps, values)
            return
        # As capturing does nothing, the group can still run op by op on these.
        before = list(values)
        try:
            # What stays is written to by runs in and out of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                replay = self._entries.take(group, values)
                with self._graphs.capture() if group.launches else nullcontext() as replay.graph:
                    interpret(group.steps, values)
                self._entries.require_unwritten()
        except RuntimeError as error:
            values[:] = before
            said = "; ".join([*str(error).splitlines()[:1], *getattr(error, "__notes__", ())])
            self._reason = f"the ops {group.name} cannot be captured: {said}"
            interpret(group.steps, values)
            return
        # What steps between the graphs made is still there when memory is counted; what graphs made is not.
        originals = [before[slot] for slot in group.entries]
        before.clear()
        if group.launches:
            self._graphs.settle()
        originals.clear()
        replay.keep({slot: values[slot] for slot in group.exits})
        self._entries.keep(replay)
        self._replays[i] = replay
        replay.run()

    def _end_capture(self) -> None:
        if self._reason != _NOT_YET:
            self._stop(self._reason, warn=True)
            return
        groups = [part for part in self._parts if isinstance(part, Group) and part.launches]
        self._captured = _Captured(
            signature=self._at_hand[0],
            schedule=self._with_groups(self._replay),
            num_graphs=len(groups),
            num_ops=sum(group.num_ops for group in groups),
        )
        if self._session.store is not None:
            read = {slot for group in groups for step in group.steps for slot in step.trait.reads}
            tensors = tensors_in([self._plain.slots[slot] for slot in sorted(read)])
            self._addresses = [(tensor, tensor.data_ptr()) for tensor in tensors]

    def _replay(self, i: int, values: list[Value]) -> None:
        try:
            self._replays[i](values)
        except PlanMismatchError as error:
            self._stop(str(error), warn=True)
            raise

    # ------------------------------------------------------------ giving up

    def _keep_budget(self, more_bytes: int, what: str, *, least_bytes: int = 0) -> None:
        """Give graphs up where the run at hand, or ``least_bytes``, and ``more_bytes`` are beyond the plan's budget."""
        counted = self._device.peak_bytes()
        limit_bytes = self._plan.budget_bytes.get(self._plan.machine.compute_tier)
        if counted is None or limit_bytes is None:
            return
        counted = max(counted, least_bytes)
        if counted + more_bytes <= limit_bytes:
            return
        self._stop(
            f"{what} {format_size(counted + more_bytes)} of the budget of {format_size(limit_bytes)}",
            warn=True,
        )

    def _stop(self, reason: str, *, warn: bool) -> None:
        self._reason = reason
        self._drop()
        if warn:
            _log.warning(
                "'%s' runs without graphs from now on, op by op: %s",
                self._plan.workload.name,
                reason,
            )

    def _drop(self) -> None:
        self._captured, self._entries, self._addresses = None, None, []
        self._mode = _OP_BY_OP
        self._replays = {}
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None


def _all_slots(values: list[Value]) -> tuple[Value, ...]:
    return (values,)


def _signature(inputs: Sequence[Value]) -> Signature:
    return tuple(
        (x.dtype, x.shape, x.stride(), x.device) if isinstance(x, torch.Tensor) else (type(x), x)
        for x in inputs
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
