"""When each transfer of a steady iteration is issued, runs, arrives and is waited for; see ``replay``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.cost_models.replay import pipe_times, up_front_prefetches
from gascompile.ir import Compute, Machine, Plan, Prefetch, Step, Wait

_ITERATIONS = 8
"""Enough for the links to reach their steady state in practice; ``replay`` is exact about seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One prefetch of the steady iteration. Times are relative to the iteration's start; negative ones lie before."""

    tensor: str
    link: str
    size_bytes: int
    issue_op: int
    """Op before which the prefetch stands."""
    wait_op: int
    """Op that waits for it."""
    issued_s: float
    begun_s: float
    arrived_s: float
    needed_s: float
    """When the wait is reached."""

    @property
    def slack_s(self) -> float:
        """By how much the transfer may be late before the op stalls; negative while it stalls."""
        return self.needed_s - self.arrived_s


@dataclass(slots=True)
class _InFlight:
    step: Prefetch
    issued_s: float
    begun_s: float
    arrived_s: float


class _Clock:
    """Time, links and transfers in flight while the steps are walked."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._link_free: dict[str, float] = {}
        self._pipe_free: dict[int, float] = {}
        self._flying: dict[tuple[str, int], _InFlight] = {}
        self.now = 0.0

    def issue(self, step: Prefetch) -> None:
        link = self._machine.link(step.link)
        pipes = pipe_times(self._machine, link, step.size_bytes)
        begun = max(self.now, self._link_free.get(link.name, 0.0))
        begun = max([begun, *(self._pipe_free.get(pipe, 0.0) for pipe, _ in pipes)])
        for pipe, time_s in pipes:
            self._pipe_free[pipe] = begun + time_s
        arrived = begun + link.transfer_time_s(step.size_bytes)
        self._link_free[link.name] = arrived
        self._flying[step.tensor, step.address] = _InFlight(step, self.now, begun, arrived)

    def wait(self, step: Wait, start_s: float) -> Transfer | None:
        """Wait for the newest copy; a second wait for the same one returns ``None``."""
        flown = self._flying.pop((step.tensor, step.address), None)
        if flown is None:
            return None
        needed = self.now
        self.now = max(self.now, flown.arrived_s)
        return Transfer(
            tensor=step.tensor,
            link=flown.step.link,
            size_bytes=flown.step.size_bytes,
            issue_op=flown.step.op,
            wait_op=step.op,
            issued_s=flown.issued_s - start_s,
            begun_s=flown.begun_s - start_s,
            arrived_s=flown.arrived_s - start_s,
            needed_s=needed - start_s,
        )


def transfers(plan: Plan, machine: Machine | None = None) -> tuple[Transfer, ...]:
    """Return the transfers that the steady iteration of ``plan`` waits for, in the order of their waits.

    Raises:
        KeyError: a step names a link that ``machine`` does not have.
    """
    clock = _Clock(machine or plan.machine)
    times_s = [op.time_s for op in plan.ops]
    repeats = plan.workload.repeats
    for i in up_front_prefetches(plan.steps) if repeats else ():
        step = plan.steps[i]
        assert isinstance(step, Prefetch)
        clock.issue(step)
    found: tuple[Transfer, ...] = ()
    for _ in range(_ITERATIONS if repeats else 1):
        found = _iterate(plan.steps, times_s, clock)
    return found


def _iterate(
    steps: Sequence[Step], times_s: Sequence[float], clock: _Clock
) -> tuple[Transfer, ...]:
    start_s = clock.now
    found = []
    for step in steps:
        if isinstance(step, Compute):
            clock.now += times_s[step.op]
        elif isinstance(step, Prefetch):
            clock.issue(step)
        elif isinstance(step, Wait):
            transfer = clock.wait(step, start_s)
            if transfer is not None:
                found.append(transfer)
    return tuple(found)
