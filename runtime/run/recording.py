"""When each step of one run ran: its calls are wrapped to write down times and live bytes.

A run that is not recorded makes the plain calls, so recording costs it nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload, Step, Wait
from gascompile.runtime.protocols import Ticket
from gascompile.runtime.run import schedule as prepared
from gascompile.runtime.stores import Store
from gascompile.runtime.transfer.mover import PlanMover


class TimedTicket(Ticket, Protocol):
    """A transfer that knows when it ran, by ``time.perf_counter``."""

    begun_s: float
    done_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One step as it ran. Times count from the beginning of the run."""

    step: Step
    begun_s: float
    ended_s: float
    bytes_before: int
    """What was live before it, without workspace."""
    bytes_after: int
    """What was live after it, before anything that it used last went."""
    ticket: TimedTicket | None = None
    """Of what the step starts or waits for."""


@dataclass(slots=True)
class Recording:
    """Pass it to ``Executor.run_recorded``; afterwards it has what happened."""

    moments: list[Moment] = field(default_factory=list)
    resident: frozenset[str] = frozenset()
    """What outlives runs and was in memory at the beginning."""
    before: Mapping[str, TimedTicket] = field(default_factory=dict)
    """Transfers that were under way at the beginning, by tensor."""
    begun_s: float = 0.0
    """By ``time.perf_counter``, like the times of tickets."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """As the report of the run says."""
    _numbers: list[int] = field(default_factory=list)
    """Of the steps of ``moments`` in the plan."""
    _elsewhere: dict[int, Moment] = field(default_factory=dict)
    """What another site did, by the numbers of its steps."""

    def begin(self, mover: PlanMover, store: Store | None) -> None:
        """Take note of what is there."""
        self.moments.clear()
        self._numbers.clear()
        self._elsewhere.clear()
        kept = store.sizes if store is not None else ()
        self.resident = frozenset(n for n in kept if store is not None and not store.is_away(n))
        # What moves the heap's tensors knows the times of its tickets.
        self.before = cast("dict[str, TimedTicket]", mover.tickets)
        self.begun_s = time.perf_counter()

    def end(self, mover: PlanMover) -> None:
        """Take note of the end, and wait for what is under way: when it ends belongs to the picture."""
        self.seconds = time.perf_counter() - self.begun_s
        self.peak_bytes = mover.live.peak_bytes
        own = dict(zip(self._numbers, self.moments, strict=True))
        self.moments[:] = [moment for _, moment in sorted({**self._elsewhere, **own}.items())]
        for moment in self.moments:
            if moment.ticket is not None:
                moment.ticket.wait()
                if moment.ticket.event is not None:
                    moment.ticket.event.wait()

    def schedule(
        self, of: prepared.RunSchedule, plan: Plan, mover: PlanMover
    ) -> prepared.RunSchedule:
        """Return the calls of a schedule with those that belong to steps of the plan wrapped."""
        timed = (
            call._replace(function=partial(self._timed, call, plan.steps, mover))
            if call.planned >= 0
            else call
            for call in of.steps
        )
        there = (
            call._replace(function=partial(self._timed_there, call, plan.steps, mover))
            if call.planned >= 0
            else call
            for call in of.elsewhere
        )
        return replace(of, steps=tuple(timed), elsewhere=tuple(there))

    def _timed_there(
        self, call: prepared.RunStep, steps: Sequence[Step], mover: PlanMover, *values: Any
    ) -> Any:
        """Make a call of another site, whose memory is not that of the picture."""
        known = self._elsewhere.get(call.planned)
        begun_s = time.perf_counter() - self.begun_s if known is None else known.begun_s
        result = call.function(*values)
        live_bytes = mover.live.live_bytes
        self._elsewhere[call.planned] = Moment(
            step=steps[call.planned],
            begun_s=begun_s,
            ended_s=time.perf_counter() - self.begun_s,
            bytes_before=live_bytes,
            bytes_after=live_bytes,
        )
        return result

    def _timed(
        self, call: prepared.RunStep, steps: Sequence[Step], mover: PlanMover, *values: Any
    ) -> Any:
        live, step = mover.live, steps[call.planned]
        ticket = mover.tickets.get(step.tensor) if isinstance(step, Wait) else None
        bytes_before, begun_s = live.live_bytes, time.perf_counter() - self.begun_s
        result = call.function(*values)
        if call.meter is not None:
            live.bear(call.meter.births, result)
        if isinstance(step, (Offload, Reload)):
            ticket = mover.tickets.get(step.tensor)
        if self.moments and self.moments[-1].step is step:
            # What had to be done before an op is a part of its step.
            first = self.moments.pop()
            self._numbers.pop()
            bytes_before, begun_s = first.bytes_before, first.begun_s
        done = Moment(
            step=step,
            begun_s=begun_s,
            ended_s=time.perf_counter() - self.begun_s,
            bytes_before=bytes_before,
            bytes_after=live.live_bytes,
            ticket=cast("TimedTicket | None", ticket),
        )
        self.moments.append(done)
        self._numbers.append(call.planned)
        # Ops of one kernel follow each other in the plan; all of its time is the first one's.
        end = replace(done, begun_s=done.ended_s, bytes_before=done.bytes_after)
        for number in range(call.planned + 1, call.planned + call.trait.num_ops):
            self.moments.append(replace(end, step=steps[number]))
            self._numbers.append(number)
        return result
