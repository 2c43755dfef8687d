"""The trace of a steady iteration: when each op and transfer runs, why ops wait, what each tier holds.

``replay`` is the cheap path and exact about the seconds of an iteration. This walks the same steps by
the same rules and writes down everything on the way. Where the steady state alternates between several
iterations, the trace shows one of them and the seconds are their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from gascompile.core.machine import Machine
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall, Timeline
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Wait
from gascompile.cost_models.formulas.contention import plan_times
from gascompile.cost_models.simulate.clock import Clock, pipe_times
from gascompile.cost_models.simulate.memory_curve import MemoryCurve, MemoryRecorder
from gascompile.cost_models.simulate.replay import replay_plan, undisturbed

LINK_BUSY, MEMORY, BANDWIDTH = "link busy", "memory", "bandwidth"
_MAX_ITERATIONS = 24
_TOLERANCE_S = 1e-12
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
    """``prefetch``, ``reload`` or ``offload``."""
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
        ValueError: a wait has no transfer.
    """
    target = machine or plan.machine
    timeline = replay_plan(plan, target)
    walk = _Walk(plan, target)
    walk.run()
    clock = _Stretch(walk, target, timeline.seconds)
    shared = {f.name: getattr(timeline, f.name) for f in fields(Timeline) if f.name != "stalls"}
    return Trace(
        **shared,
        stalls=_with_causes(walk, target),
        machine=target.name,
        ops=tuple(map(clock.op, walk.ops)),
        transfers=tuple(
            sorted(map(clock.transfer, walk.transfers), key=lambda t: (t.begun_s, t.arrived_s))
        ),
        memory={tier: clock.memory(curve) for tier, curve in walk.memory.curves().items()},
    )


def _with_causes(walk: _Walk, machine: Machine) -> tuple[Stall, ...]:
    """Return the stalls with why the transfer came late."""
    full_s = _SATURATED * walk.seconds
    pipe_s = dict.fromkeys(range(len(machine.pipes)), 0.0)
    link_s: dict[str, float] = {}
    for t in walk.issued:
        link = machine.link(t.link)
        link_s[t.link] = link_s.get(t.link, 0.0) + link.transfer_time_s(t.size_bytes)
        for pipe, time_s in pipe_times(machine, link, t.size_bytes):
            pipe_s[pipe] += time_s
    found = []
    for stall, t in walk.stalls:
        pipes = pipe_times(machine, machine.link(t.link), t.size_bytes)
        if link_s.get(t.link, 0.0) >= full_s or any(pipe_s[pipe] >= full_s for pipe, _ in pipes):
            cause, blocker = BANDWIDTH, ""
        elif t.begun_s > t.issued_s:
            cause, blocker = LINK_BUSY, t.after
        elif t.freed_by:
            cause, blocker = MEMORY, t.freed_by
        else:
            cause, blocker = BANDWIDTH, ""
        found.append(replace(stall, cause=cause, blocker=blocker))
    return tuple(found)


class _Stretch:
    """From the time of links, in which the steps are walked, to that of the machine."""

    def __init__(self, walk: _Walk, machine: Machine, seconds: float) -> None:
        disturbed = machine.interference.points or machine.interference.op_s_per_byte
        # Where ops of two sites run at once, no moment of the one time is one of the other.
        self._is_one = not disturbed or walk.has_sites
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


class _Walk:
    """The steps, walked iteration after iteration until nothing changes any more."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self._plan = plan
        self._machine = machine
        self._clock = Clock.of(len(machine.links), len(machine.pipes))
        self._links = {link.name: i for i, link in enumerate(machine.links)}
        self._on_link: dict[int, str] = {}
        self._on_pipe: dict[int, str] = {}
        """The tensor that was the last to take it."""
        self._flying: dict[tuple[str, int | None], Transfer] = {}
        self._partners: dict[str, int] = {}
        """The clock of the site that each copy out of the tier that computes goes to."""
        self._changed_s: dict[str, float] = {}  # by ops elsewhere, in this iteration
        self._freed_by = _freed_by(plan)
        # In the time of links, which ops do not slow down; see ``undisturbed``.
        self.ops_s = plan_times(plan, machine)
        self._times_s = undisturbed(plan.workload.ops, self.ops_s, machine)
        self._sites, self._now = plan_sites(plan), 0.0
        """The clock of the tier that computes stands at its step of the moment."""
        self._elsewhere = [0.0] * (len(self._sites.others) if self._sites is not None else 0)
        """Of the other sites."""
        self._start = 0.0
        self.memory = MemoryRecorder(plan)
        self.seconds = 0.0
        self.ops: list[OpSpan] = []
        self.transfers: list[Transfer] = []
        self.issued: list[Transfer] = []
        self.stalls: list[tuple[Stall, Transfer]] = []

    @property
    def has_sites(self) -> bool:
        """Whether ops run on several sites."""
        return self._sites is not None

    def run(self) -> None:
        """Walk until an iteration ends as it began; the lists then hold the last one."""
        before: list[float] | None = None
        for _ in range(_MAX_ITERATIONS if self._plan.workload.repeats else 1):
            self._iterate()
            state = self._state()
            if before is not None and _close(before, state):
                return
            before = state

    def _iterate(self) -> None:
        self._start = self._now
        self._elsewhere = [self._now] * len(self._elsewhere)
        self._changed_s.clear()
        for found in (self.ops, self.transfers, self.issued, self.stalls):
            found.clear()
        self.memory.begin()
        for i, step in enumerate(self._plan.steps):
            match step:
                case Compute():
                    self._compute(step.op, recomputed=False)
                case Recompute():
                    self._compute(step.source, recomputed=True)
                case Wait():
                    self._wait(step)
                case Prefetch() | Offload() | Reload():
                    self._issue(i, step)
                case Release():
                    pass
            self.memory.step(i, step, self._latest() - self._start)
        self._now = max((self._now, *self._elsewhere))
        self.seconds = self._now - self._start
        self.memory.end(self.seconds)
        self.transfers += (_shifted(t, self._start) for t in self._flying.values())

    def _compute(self, op: int, *, recomputed: bool) -> None:
        planned, clock = self._plan.ops[op], self._sites.clock(op) if self._sites is not None else 0
        begun_s = self._at(clock)
        self.memory.before_op(op, self._latest() - self._start)
        ended_s = begun_s + self._times_s[op]
        self._set(clock, ended_s)
        if self._sites is not None and clock:
            self._changed_s.update(dict.fromkeys(self._sites.changed.get(op, ()), ended_s))
        self.ops.append(
            OpSpan(
                op=op,
                site=planned.site,
                begun_s=begun_s - self._start,
                ended_s=ended_s - self._start,
                recomputed=recomputed,
            )
        )

    def _at(self, clock: int) -> float:
        return self._elsewhere[clock - 1] if clock else self._now

    def _set(self, clock: int, now_s: float) -> None:
        if clock:
            self._elsewhere[clock - 1] = now_s
        else:
            self._now = now_s

    def _latest(self) -> float:
        """Return the time of the account of memory, which is kept in program order."""
        return max((self._now, *self._elsewhere))

    def _partner(self, step: Prefetch | Offload | Reload) -> int:
        if self._sites is None or isinstance(step, Prefetch):
            return 0
        return self._sites.partner(step, self._machine)

    def _issue(self, i: int, step: Prefetch | Offload | Reload) -> None:
        link, clock = self._machine.link(step.link), self._clock
        number, pipes = self._links[link.name], pipe_times(self._machine, link, step.size_bytes)
        blocks = [(clock.link_free[number], self._on_link.get(number, ""))]
        blocks += ((clock.pipe_free[pipe], self._on_pipe.get(pipe, "")) for pipe, _ in pipes)
        seconds = link.transfer_time_s(step.size_bytes)
        partner = self._partner(step)
        if isinstance(step, Reload):
            self._now = max(self._now, self._changed_s.get(step.tensor, 0.0))
        issued_s = self._now
        if not partner or (self._sites is not None and step.tensor in self._sites.queued):
            begun_s = clock.issue(number, seconds, pipes, issued_s)
        else:
            issued_s = max(issued_s, self._at(-partner)) if partner < 0 else issued_s
            begun_s = clock.issue_ahead(number, seconds, issued_s)
        self._on_link[number] = step.tensor
        self._on_pipe.update(dict.fromkeys((pipe for pipe, _ in pipes), step.tensor))
        arrived_s = begun_s + seconds
        found = Transfer(
            kind=type(step).__name__.lower(),
            tensor=step.tensor,
            link=step.link,
            size_bytes=step.size_bytes,
            issue_op=step.op,
            issued_s=issued_s,
            begun_s=begun_s,
            arrived_s=arrived_s,
            after=max(blocks)[1] if begun_s > issued_s else "",
            freed_by=self._freed_by.get(i, ""),
        )
        if partner > 0:
            self._partners[step.tensor] = partner
        self._flying[step.tensor, step.address] = found
        self.issued.append(found)

    def _wait(self, step: Wait) -> None:
        if step.site is not None and self._sites is not None:
            clock = 1 + self._sites.others.index(step.site)
            arrived_s = self._flying[step.tensor, step.address].arrived_s
            self._set(clock, max(self._at(clock), arrived_s))
            return
        flown = self._flying.pop((step.tensor, step.address), None)
        if flown is None:
            return
        needed_s = self._now
        self._now = max(self._now, flown.arrived_s)
        partner = self._partners.pop(step.tensor, 0) if step.address is None else 0
        if partner:
            self._set(partner, max(self._at(partner), flown.arrived_s))
        done = _shifted(replace(flown, wait_op=step.op, needed_s=needed_s), self._start)
        self.transfers.append(done)
        if flown.arrived_s > needed_s:
            late_s = flown.arrived_s - needed_s
            stall = Stall(op=step.op, tensor=step.tensor, time_s=late_s, link=flown.link)
            self.stalls.append((stall, done))

    def _state(self) -> list[float]:
        """Return what the next iteration depends on, as seconds from now."""
        times = [*self._clock.times(), *(t.arrived_s for t in self._flying.values())]
        return [self.seconds, *(max(0.0, time_s - self._now) for time_s in times)]


def _shifted(t: Transfer, start_s: float) -> Transfer:
    return replace(
        t,
        issued_s=t.issued_s - start_s,
        begun_s=t.begun_s - start_s,
        arrived_s=t.arrived_s - start_s,
        needed_s=None if t.needed_s is None else t.needed_s - start_s,
    )


def _close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= _TOLERANCE_S for x, y in zip(a, b, strict=True))


def _freed_by(plan: Plan) -> dict[int, str]:
    """Return per transfer into memory the tensor that left its place just before.

    In the arena that is the last one released from the same addresses since the last op; on the heap
    the last one released since then.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
    found: dict[int, str] = {}
    released: list[Release] = []
    for i, step in enumerate(plan.steps):
        if isinstance(step, (Compute, Recompute)):
            released.clear()
        elif isinstance(step, Release):
            released.append(step)
        elif isinstance(step, (Prefetch, Reload)):
            names = [r.tensor for r in released if _overlap(step, r, sizes)]
            if names:
                found[i] = names[-1]
    return found


def _overlap(step: Prefetch | Reload, other: Release, sizes: Mapping[str, int]) -> bool:
    if step.address is None or other.address is None:
        return step.address is other.address
    end = step.address + reserve_bytes(step.size_bytes)
    other_end = other.address + reserve_bytes(sizes.get(other.tensor, 0))
    return step.address < other_end and other.address < end
