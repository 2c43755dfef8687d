"""When each step of one iteration ran: a twin of its run that writes down times and live bytes.

An iteration that is not recorded runs the plain class, so recording costs it nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import fx

from gascompile.core.steps import Compute, Offload, Recompute, Reload, Step, Wait
from gascompile.runtime.protocols import Ticket
from gascompile.runtime.run.iteration import Iteration
from gascompile.runtime.run.liveness import Entry
from gascompile.runtime.run.step_run import Run


class TimedTicket(Ticket, Protocol):
    """A transfer that knows when it ran, by ``time.perf_counter``."""

    begun_s: float
    done_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One step as it ran. Times count from the beginning of the iteration."""

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
    """Pass it to ``Iteration.run``; afterwards it has what happened."""

    moments: list[Moment] = field(default_factory=list)
    resident: frozenset[str] = frozenset()
    """What persists and was in memory at the beginning."""
    before: Mapping[str, TimedTicket] = field(default_factory=dict)
    """Transfers that were under way at the beginning, by tensor."""
    begun_s: float = 0.0
    """By ``time.perf_counter``, like the times of tickets."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """As the report of the run says."""

    def run(self, of: Iteration, inputs: Sequence[Any], tickets: dict[str, Ticket]) -> Run:
        """Return the state of an iteration that is recorded here."""
        return _RecordedRun(of, inputs, tickets, self)


class _RecordedRun(Run):
    def __init__(
        self,
        of: Iteration,
        inputs: Sequence[Any],
        tickets: dict[str, Ticket],
        recording: Recording,
    ) -> None:
        super().__init__(of, inputs, tickets)
        self._recording = recording

    def steps(self, entries: Sequence[Entry]) -> None:
        found = self._recording
        # Moves that stand for those of an iteration before are none of this one.
        found.moments.clear()
        found.resident = self.resident()
        found.before = {name: cast(TimedTicket, t) for name, t in self.tickets.items()}
        found.begun_s = time.perf_counter()
        super().steps(entries)
        found.seconds = time.perf_counter() - found.begun_s
        found.peak_bytes = self.peak_bytes
        for moment in found.moments:
            if moment.ticket is not None:
                # Those for the next iteration, too: when they end belongs to the picture.
                moment.ticket.wait()
                if moment.ticket.event is not None:
                    moment.ticket.event.wait()

    def op(self, step: Compute | Recompute, nodes: Sequence[fx.Node]) -> None:
        before, begun_s = self.live_bytes, time.perf_counter()
        super().op(step, nodes)
        self._note(step, begun_s, before, None)

    def move(self, step: Step) -> None:
        ticket = self.tickets.get(step.tensor) if isinstance(step, Wait) else None
        before, begun_s = self.live_bytes, time.perf_counter()
        super().move(step)
        if isinstance(step, (Offload, Reload)):
            ticket = self.tickets[step.tensor]
        self._note(step, begun_s, before, ticket)

    def _note(self, step: Step, begun_s: float, before: int, ticket: Ticket | None) -> None:
        now_s, start_s = time.perf_counter(), self._recording.begun_s
        self._recording.moments.append(
            Moment(
                step=step,
                begun_s=begun_s - start_s,
                ended_s=now_s - start_s,
                bytes_before=before,
                bytes_after=self.live_bytes,
                # What persists and activations alike are moved by ``Spill``, whose tickets know their times.
                ticket=cast("TimedTicket | None", ticket),
            )
        )
