"""The timeline of a measured step beside the predicted one: each op and transfer, waits, memory over time.

Both are traces of the same kind, so that one file and one picture show them side by side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gascompile.core import serial
from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Wait
from gascompile.core.workload import TensorKind
from gascompile.cost_models.simulate.memory_curve import (
    ACTIVATIONS,
    STATES,
    STREAMED,
    WEIGHTS,
    WORKSPACE,
    MemoryCurve,
)
from gascompile.cost_models.simulate.trace import (
    BANDWIDTH,
    LINK_BUSY,
    MEMORY,
    OpSpan,
    Trace,
    Transfer,
    trace,
)
from gascompile.report.perfetto import perfetto_of_several
from gascompile.report.picture import picture_of_several
from gascompile.runtime.run.recording import Moment, Recording, TimedTicket
from gascompile.training.step import TrainingStep

TRACE_FILE, PICTURE_FILE = "timeline.perfetto.json", "timeline.png"
_PERSISTENT = (STATES, WEIGHTS, STREAMED)
_STALL_S = 1e-5
"""Shorter waits are the cost of looking, as in the report of a run."""
_LATE_S = 1e-4
"""A transfer that begins this long after its step found its thread busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step as it ran and as it was planned."""

    loss: torch.Tensor
    plan: Plan
    measured: Trace
    predicted: Trace
    begun_s: float = 0.0
    """When it began, by ``time.perf_counter``."""

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write a trace file for ui.perfetto.dev and a picture, each with both; return their paths.

        Raises:
            GASCompileError: matplotlib is not installed, or the folder cannot be written to.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        both = {"predicted": self.predicted, "measured": self.measured}
        trace_file, picture_file = target / TRACE_FILE, target / PICTURE_FILE
        serial.write_output(trace_file, serial.dumps(perfetto_of_several(self.plan, both)))
        picture_of_several(self.plan, both, picture_file)
        return trace_file, picture_file


def record(step: TrainingStep, batch: Any) -> RecordedStep:
    """Run one step, as ``step(batch)`` does, and write down when each op and transfer ran.

    The first step after planning, or after an evaluation, also brings tensors to their places; record a later one.

    Raises:
        InfeasiblePlanError: the budget is too small for batches of this shape; names the smallest.
        StorageError: a transfer failed, now or before.
    """
    recording = Recording()
    step.recording = recording
    try:
        loss = step(batch)
    finally:
        step.recording = None
    assert step.plan is not None
    return RecordedStep(
        loss=loss,
        plan=step.plan,
        measured=measured_trace(step.plan, recording),
        predicted=trace(step.plan),
        begun_s=recording.begun_s,
    )


def measured_trace(plan: Plan, recording: Recording) -> Trace:
    """Return what was recorded of a step as a trace.

    Raises:
        PlanMismatchError: the recording is of another plan.
    """
    if [moment.step for moment in recording.moments] != list(plan.steps):
        raise PlanMismatchError("the recording is of another plan; record a step of this one")
    transfers, waits = _Transfers(plan, recording).all()
    busy: dict[str, float] = {}
    for t in transfers:
        inside_s = min(t.arrived_s, recording.seconds) - max(t.begun_s, 0.0)
        busy[t.link] = busy.get(t.link, 0.0) + max(inside_s, 0.0)
    moved: dict[str, int] = {}
    for moment in recording.moments:
        if isinstance(moment.step, (Offload, Reload)):
            moved[moment.step.link] = moved.get(moment.step.link, 0) + moment.step.size_bytes
    tier = plan.machine.compute_tier
    return Trace(
        seconds=recording.seconds,
        first_iteration_s=recording.seconds,
        stalls=tuple(stall for stall, _ in waits),
        link_busy_s=busy,
        link_bytes=moved,
        peak_bytes={tier: recording.peak_bytes},
        machine=plan.machine.name,
        ops=tuple(_op_spans(plan, recording.moments)),
        transfers=tuple(sorted(transfers, key=lambda t: (t.begun_s, t.arrived_s))),
        memory={tier: _memory(plan, recording)},
    )


def _op_spans(plan: Plan, moments: Sequence[Moment]) -> list[OpSpan]:
    spans = []
    for moment in moments:
        if isinstance(moment.step, (Compute, Recompute)):
            again = isinstance(moment.step, Recompute)
            op = moment.step.source if isinstance(moment.step, Recompute) else moment.step.op
            spans.append(
                OpSpan(
                    op=op,
                    site=plan.ops[op].site,
                    begun_s=moment.begun_s,
                    ended_s=moment.ended_s,
                    recomputed=again,
                )
            )
    return spans


class _Transfers:
    """Finds the transfers that a step started or waited for, and why it waited."""

    def __init__(self, plan: Plan, recording: Recording) -> None:
        self._plan, self._recording = plan, recording
        self._flying: dict[str, Transfer] = {}
        self._done: list[Transfer] = []
        self._waits: list[tuple[Stall, Transfer]] = []
        last = {s.tensor: s for s in plan.steps if isinstance(s, (Offload, Reload))}
        for name, ticket in recording.before.items():
            self._start(last[name], ticket, None, "")

    def all(self) -> tuple[list[Transfer], list[tuple[Stall, Transfer]]]:
        """Return the transfers, and the waits with the transfer of each."""
        released = ""
        for moment in self._recording.moments:
            match moment.step:
                case Compute() | Recompute():
                    released = ""
                case Release(tensor=name):
                    released = name
                case Offload() as step if moment.ticket is not None:
                    self._start(step, moment.ticket, moment.ended_s, "")
                case Reload() as step if moment.ticket is not None:
                    self._start(step, moment.ticket, moment.ended_s, released)
                case Wait(tensor=name, site=None) as step if name in self._flying:
                    self._wait(self._flying.pop(name), step, moment)
                case _:
                    pass
        self._done += self._flying.values()
        return self._done, [(self._with_cause(stall, t), t) for stall, t in self._waits]

    def _start(
        self,
        step: Offload | Reload,
        ticket: TimedTicket,
        issued_s: float | None,
        freed_by: str,
    ) -> None:
        start_s = self._recording.begun_s
        begun_s, arrived_s = ticket.begun_s - start_s, ticket.done_s - start_s
        self._flying[step.tensor] = Transfer(
            kind=type(step).__name__.lower(),
            tensor=step.tensor,
            link=step.link,
            size_bytes=step.size_bytes,
            issue_op=step.op,
            issued_s=begun_s if issued_s is None else min(issued_s, begun_s),
            begun_s=begun_s,
            arrived_s=arrived_s,
            freed_by=freed_by,
        )

    def _wait(self, transfer: Transfer, step: Wait, moment: Moment) -> None:
        done = replace(transfer, wait_op=step.op, needed_s=moment.begun_s)
        self._done.append(done)
        waited_s = moment.ended_s - moment.begun_s
        if waited_s > _STALL_S and done.arrived_s > moment.begun_s:
            stall = Stall(op=step.op, tensor=step.tensor, time_s=waited_s, link=transfer.link)
            self._waits.append((stall, done))

    def _with_cause(self, stall: Stall, t: Transfer) -> Stall:
        if t.begun_s - t.issued_s > _LATE_S:
            ahead = [o for o in self._done if o.link == t.link and o.begun_s < t.begun_s]
            blocker = max(ahead, key=lambda o: o.begun_s).tensor if ahead else ""
            return replace(stall, cause=LINK_BUSY, blocker=blocker)
        if t.freed_by:
            return replace(stall, cause=MEMORY, blocker=t.freed_by)
        return replace(stall, cause=BANDWIDTH)


def _memory(plan: Plan, recording: Recording) -> MemoryCurve:
    """Return what was live over time: what persists by its kind, the rest as activations, and planned workspace."""
    uses = _uses(plan)
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
    held = dict.fromkeys(_PERSISTENT, 0)

    def change(name: str, sign: int) -> None:
        if name in uses:
            held[uses[name]] += sign * sizes[name]

    for name in recording.resident:
        change(name, 1)
    curve = _Curve()
    own = plan.machine.compute_tier
    for moment in recording.moments:
        if _is_elsewhere(plan, moment, own):
            continue
        curve.add(moment.begun_s, held, moment.bytes_before, 0)
        match moment.step:
            case Compute(op=op) | Recompute(source=op):
                workspace_bytes = plan.workload.ops[op].workspace_bytes
                curve.add(moment.begun_s, held, moment.bytes_after, workspace_bytes)
            case Reload(tensor=name):
                change(name, 1)
            case Release(tensor=name):
                change(name, -1)
            case _:
                pass
        curve.add(moment.ended_s, held, moment.bytes_after, 0)
    return curve.done()


def _is_elsewhere(plan: Plan, moment: Moment, own: str) -> bool:
    """Return whether what was done takes nothing of the tier that computes, in a time of its own."""
    step = moment.step
    if isinstance(step, Compute):
        return plan.ops[step.op].site != own
    return isinstance(step, Wait) and step.site is not None


def _uses(plan: Plan) -> dict[str, str]:
    """Return what each tensor that persists is counted as, like in a predicted trace."""
    leaving = {step.tensor for step in plan.steps if isinstance(step, Release)}
    kind_of = {}
    for tensor in plan.workload.tensors:
        if tensor.kind is TensorKind.STATE:
            kind_of[tensor.name] = STATES
        elif tensor.kind is TensorKind.WEIGHT:
            kind_of[tensor.name] = STREAMED if tensor.name in leaving else WEIGHTS
    return kind_of


class _Curve:
    """Levels at the moments at which they change."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._rows: list[tuple[int, ...]] = []

    def add(self, time_s: float, held: dict[str, int], live_bytes: int, workspace: int) -> None:
        activations = live_bytes - sum(held.values())
        row = (*(held[use] for use in _PERSISTENT), activations, workspace)
        if not self._rows or self._rows[-1] != row:
            self._times.append(time_s)
            self._rows.append(row)

    def done(self) -> MemoryCurve:
        uses = (*_PERSISTENT, ACTIVATIONS, WORKSPACE)
        columns = dict(zip(uses, zip(*self._rows, strict=True), strict=True))
        return MemoryCurve(
            times_s=tuple(self._times),
            bytes_by_use={use: column for use, column in columns.items() if any(column)},
        )
