"""The trace of a steady iteration: when each op and transfer runs, why ops wait, what each tier holds.

``replay`` tells the seconds of an iteration; this runs the same events and keeps a record of them. Where the
steady state alternates between several iterations, the trace shows one of them and the seconds are their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import cast

import numpy as np

from gascompile.core.machine import Machine
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall, Timeline
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Fetch, Offload, Prefetch, Recompute, Release, Reload
from gascompile.cost_models.formulas.contention import plan_times
from gascompile.cost_models.simulate.clock import pipe_times
from gascompile.cost_models.simulate.events import (
    ARRIVE,
    CROSS,
    PREFETCH,
    PUSH,
    WAIT,
    Record,
    steady_iteration,
)
from gascompile.cost_models.simulate.memory_curve import MemoryCurve, memory_curves
from gascompile.cost_models.simulate.replay import compile_events, contention_free, replay_plan

LINK_BUSY, MEMORY, BANDWIDTH = "link busy", "memory", "bandwidth"
_AT_ONCE_S = 1e-12  # rounding of sums of seconds
_SATURATED = 0.999
"""Share of an iteration from which on a link counts as busy all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpan:
    """One run of an op. Times count from the beginning of the iteration."""

    op: int
    site: str
    begun_s: float
    ended_s: float
    recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer that the iteration waits for or starts; negative times lie before the iteration."""

    kind: str
    """``fetch``, ``prefetch``, ``reload`` or ``offload``."""
    tensor: str
    link: str
    size_bytes: int
    issue_op: int
    """Op before which the step stands that starts it."""
    issued_s: float
    begun_s: float
    arrived_s: float
    wait_op: int | None = None
    """Op before which it is waited for; ``None`` where that is in the next iteration, or never."""
    needed_s: float | None = None
    """When the wait is reached."""
    after: str = ""
    """The tensor whose transfer kept the link, or a pipe of it, until this one began."""
    freed_by: str = ""
    """The tensor that had to give up its memory before this one could start."""

    @property
    def slack_s(self) -> float:
        """By how much it may come later before an op stalls; negative while one stalls."""
        return 0.0 if self.needed_s is None else self.needed_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Timeline):
    """A replay with all that happens in the steady iteration."""

    machine: str
    ops: tuple[OpSpan, ...]
    transfers: tuple[Transfer, ...]
    """In the order in which they occupy their links."""
    memory: Mapping[str, MemoryCurve]
    """Per tier what it holds over time."""


def trace(plan: Plan, machine: Machine | None = None) -> Trace:
    """Return the trace of ``plan`` on ``machine``, by default the one it was made for; pure.

    Raises:
        KeyError: a step names a link that ``machine`` does not have.
        PlanVerificationError: a step breaks a rule of the walk.
        ValueError: a wait has no transfer.
    """
    target = machine or plan.machine
    timeline = replay_plan(plan, target)
    walk = _Iteration(plan, target)
    clock = _Stretch(walk, target, timeline.seconds)
    curves = memory_curves(plan, walk.step_times_s(), walk.seconds)
    shared = {f.name: getattr(timeline, f.name) for f in fields(Timeline) if f.name != "stalls"}
    return Trace(
        **shared,
        stalls=_with_causes(walk, target),
        machine=target.name,
        ops=tuple(map(clock.op, walk.ops)),
        transfers=tuple(
            sorted(map(clock.transfer, walk.transfers), key=lambda t: (t.begun_s, t.arrived_s))
        ),
        memory={tier: clock.memory(curve) for tier, curve in curves.items()},
    )


def _with_causes(walk: _Iteration, machine: Machine) -> tuple[Stall, ...]:
    """Return the stalls with why the transfer came late."""
    full_s = _SATURATED * walk.seconds
    pipe_s = dict.fromkeys(range(len(machine.pipes)), 0.0)
    link_s: dict[str, float] = {}
    for t in walk.issued:
        link = machine.link(t.link)
        link_s[t.link] = link_s.get(t.link, 0.0) + link.transfer_time_s(t.size_bytes)
        for pipe, time_s in pipe_times(machine, link, t.size_bytes):
            pipe_s[pipe] += time_s
    stalls = []
    for stall, push in walk.stalls:
        t = _held_up_by(push, walk)
        pipes = pipe_times(machine, machine.link(t.link), t.size_bytes)
        if link_s.get(t.link, 0.0) >= full_s or any(pipe_s[pipe] >= full_s for pipe, _ in pipes):
            cause, blocker = BANDWIDTH, ""
        elif t.begun_s > t.issued_s:
            cause, blocker = LINK_BUSY, t.after
        elif t.freed_by:
            cause, blocker = MEMORY, t.freed_by
        else:
            cause, blocker = BANDWIDTH, ""
        stalls.append(replace(stall, cause=cause, blocker=blocker, link=t.link))
    return tuple(stalls)


def _held_up_by(late: Transfer, walk: _Iteration) -> Transfer:
    """Return the fetch that a push had to wait for, or the transfer itself."""
    for t in walk.transfers:
        if t.kind == "fetch" and t.tensor == late.tensor and walk.seconds:
            # They may be of different iterations.
            apart_s = (late.begun_s - t.arrived_s) % walk.seconds
            if min(apart_s, walk.seconds - apart_s) <= _AT_ONCE_S:
                return t
    return late


class _Stretch:
    """From contention-free time, in which the steps are walked, to that of the machine."""

    def __init__(self, walk: _Iteration, machine: Machine, seconds: float) -> None:
        contends = machine.interference.points or machine.interference.op_s_per_byte
        # Where ops of two sites run at once, no moment of the one time is one of the other.
        self._is_one = not contends or walk.has_sites
        self._links_s, self._machine_s = [0.0], [0.0]
        for op in walk.ops:
            self._add(op.begun_s)
            self._add(op.ended_s, walk.ops_s[op.op])
        self._add(walk.seconds)
        if self._machine_s[-1]:
            # What moving takes from the processors is spread over the iteration.
            slower = seconds / self._machine_s[-1]
            self._machine_s = [time_s * slower for time_s in self._machine_s]

    def _add(self, links_s: float, took_s: float | None = None) -> None:
        passed_s = links_s - self._links_s[-1]
        self._links_s.append(links_s)
        self._machine_s.append(self._machine_s[-1] + (passed_s if took_s is None else took_s))

    def at(self, time_s: float) -> float:
        """Return a moment; before the iteration lies another one like it, and after it, too."""
        if self._is_one:
            return time_s
        period_s = self._links_s[-1]
        turns = math.floor(time_s / period_s) if period_s else 0
        inside_s = float(np.interp(time_s - turns * period_s, self._links_s, self._machine_s))
        return turns * self._machine_s[-1] + inside_s

    def op(self, span: OpSpan) -> OpSpan:
        return replace(span, begun_s=self.at(span.begun_s), ended_s=self._end(span.ended_s))

    def transfer(self, t: Transfer) -> Transfer:
        return replace(
            t,
            issued_s=self.at(t.issued_s),
            begun_s=self.at(t.begun_s),
            arrived_s=self._end(t.arrived_s),
            needed_s=None if t.needed_s is None else self.at(t.needed_s),
        )

    def memory(self, curve: MemoryCurve) -> MemoryCurve:
        return replace(curve, times_s=tuple(map(self._end, curve.times_s)))

    def _end(self, time_s: float) -> float:
        """Return a moment that belongs to what lies before it."""
        return (
            self._machine_s[-1]
            if not self._is_one and time_s == self._links_s[-1]
            else self.at(time_s)
        )


class _Iteration:
    """The steady iteration, step by step, in contention-free time; see ``contention_free``."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.ops_s = plan_times(plan, machine)
        sites = plan_sites(plan)
        self.has_sites = sites is not None
        self._plan, self._machine = plan, machine
        self._events = compile_events(
            plan.steps,
            contention_free(plan.workload.ops, self.ops_s, machine),
            machine,
            repeats=plan.workload.repeats,
            sites=sites,
            ops_apart=True,
        )
        self._record = Record()
        steady_iteration(self._events, self._record)
        self.seconds = self._record.seconds
        self._issuers = {
            copy: number
            for number, (kind, copy, _) in enumerate(self._events.events)
            if kind in (PREFETCH, CROSS, PUSH)
        }
        """The event that starts each copy."""
        self._freed_by = _freed_by(plan)
        self.ops: list[OpSpan] = []
        self.issued: list[Transfer] = []
        self.transfers: list[Transfer] = []
        """All that are waited for, and what is on its way at the end."""
        self.stalls: list[tuple[Stall, Transfer]] = []
        self._take()

    def step_times_s(self) -> list[tuple[float, float]]:
        """Return when each step begins and ends in program order."""
        latest = (event.latest_s for event in self._record.events)
        ended = dict(zip(self._events.step_of, latest, strict=True))
        ends = list(
            accumulate(range(len(self._plan.steps)), lambda s, i: ended.get(i, s), initial=0.0)
        )
        return list(pairwise(ends))

    def _take(self) -> None:
        """Go through the events."""
        early = self._events.crossing() if self._events.repeats else ()
        had = self._had_ahead()
        flying = {copy: True for copy in early if copy not in had}
        """Whether each copy is of the iteration before."""
        for (kind, copy, _), i, event in zip(
            self._events.events, self._events.step_of, self._record.events, strict=True
        ):
            step = self._plan.steps[i]
            if isinstance(step, (Compute, Recompute)):
                self._take_op(step, event.at_s, event.ended_s)
            elif kind in (PREFETCH, CROSS, PUSH):
                source = self._events.source_of.get(copy)
                if source is not None and source in flying:
                    # Nobody waits for what is half the way; from here on it is needed.
                    fetched = self._transfer(source, is_before=flying.pop(source))
                    self.transfers.append(replace(fetched, wait_op=step.op, needed_s=None))
                flying[copy] = False
                self.issued.append(self._transfer(copy))
            elif kind in (WAIT, ARRIVE) and copy in flying:
                started = self._transfer(copy, is_before=flying.pop(copy))
                done = replace(started, wait_op=step.op, needed_s=event.at_s)
                self.transfers.append(done)
                if done.slack_s < 0:
                    late = Stall(
                        op=step.op, tensor=done.tensor, time_s=-done.slack_s, link=done.link
                    )
                    self.stalls.append((late, done))
        self.transfers += map(self._transfer, flying)

    def _had_ahead(self) -> set[int]:
        """Return the copies half the way that something is pushed of before the iteration ends that fetches them."""
        had: set[int] = set()
        for kind, copy, _ in self._events.events:
            if kind == PREFETCH:
                had.discard(copy)
            elif kind == PUSH:
                had.add(self._events.source_of[copy])
        return had

    def _take_op(self, step: Compute | Recompute, begun_s: float, ended_s: float) -> None:
        op = step.op if isinstance(step, Compute) else step.source
        self.ops.append(
            OpSpan(
                op=op,
                site=self._plan.ops[op].site,
                begun_s=begun_s,
                ended_s=ended_s,
                recomputed=isinstance(step, Recompute),
            )
        )

    def _transfer(self, copy: int, *, is_before: bool = False) -> Transfer:
        """Return the transfer of a copy that this iteration starts, or the one before it."""
        number, record = self._issuers[copy], self._record
        before_s, before = record.before
        events = before if is_before and before else record.events
        shift_s = (before_s if before else record.seconds) if is_before else 0.0
        event, step = events[number], self._step(copy)
        holder = record.holders[copy]
        is_late = event.begun_s > event.at_s
        return Transfer(
            kind=type(step).__name__.lower(),
            tensor=step.tensor,
            link=step.link,
            size_bytes=step.size_bytes,
            issue_op=step.op,
            issued_s=event.at_s - shift_s,
            begun_s=event.begun_s - shift_s,
            arrived_s=event.ended_s - shift_s,
            after=self._step(holder).tensor if is_late and holder is not None else "",
            freed_by=self._freed_by.get(self._events.step_of[number], ""),
        )

    def _step(self, copy: int) -> Fetch | Prefetch | Offload | Reload:
        """Return the step that starts a copy."""
        step = self._plan.steps[self._events.step_of[self._issuers[copy]]]
        return cast(Fetch | Prefetch | Offload | Reload, step)


def _freed_by(plan: Plan) -> dict[int, str]:
    """Return per transfer into memory the tensor that left its place just before.

    In the arena that is the last one released from the same addresses since the last op; on the heap
    the last one released since then.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
    freed_by: dict[int, str] = {}
    released: list[Release] = []
    for i, step in enumerate(plan.steps):
        if isinstance(step, (Compute, Recompute)):
            released.clear()
        elif isinstance(step, Release):
            released.append(step)
        elif isinstance(step, (Prefetch, Reload)):
            names = [r.tensor for r in released if _overlap(step, r, sizes)]
            if names:
                freed_by[i] = names[-1]
    return freed_by


def _overlap(step: Prefetch | Reload, other: Release, sizes: Mapping[str, int]) -> bool:
    if step.address is None or other.address is None:
        return step.address is other.address
    end = step.address + reserve_bytes(step.size_bytes)
    other_end = other.address + reserve_bytes(sizes.get(other.tensor, 0))
    return step.address < other_end and other.address < end
