"""Stage clock: how long ranks of a pipeline wait for each other in a step, by the clock of all other plans.

A rank is a stream that runs one leg after the other, in its order; what a leg receives has to be there when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gascompile.cost_models.simulate.clock import Clock
from gascompile.passes.parallel.legs import Action, Legs


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What a step takes beside the ops of each rank."""

    before_s: dict[Action, float]
    """How long a rank waits before a leg."""
    ends_s: tuple[float, ...]
    """When each rank has run its last leg."""


def waits(
    legs: Legs,
    orders: Sequence[Sequence[Action]],
    leg_s: Sequence[float],
    transfer_s: Callable[[int], float],
) -> Waits:
    """Return how long ranks wait for each other.

    Args:
        legs: with messages.
        orders: the actions of each rank, in their order.
        leg_s: seconds of each leg for one micro-batch.
        transfer_s: seconds in which so many bytes get from one rank to another.
    """
    size = len(orders)
    clock = Clock.of(size, 0)
    done = [0] * size
    ends: dict[Action, float] = {}
    before: dict[Action, float] = {}
    arrives = [(m.source, m.target, transfer_s(m.size_bytes)) for m in legs.messages]
    left = sum(map(len, orders))
    while left:
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = order[done[rank]]
                needed = [
                    (Action(leg=source, batch=action.batch), passed_s)
                    for source, target, passed_s in arrives
                    if target == action.leg
                ]
                if not all(sender in ends for sender, _ in needed):
                    break
                free_s = clock.link_free[rank]
                ready_s = max([0.0, *(ends[sender] + passed_s for sender, passed_s in needed)])
                begun_s = clock.issue(rank, leg_s[action.leg], (), ready_s)
                before[action] = begun_s - free_s
                ends[action] = begun_s + leg_s[action.leg]
                done[rank] += 1
                left -= 1
    return Waits(before_s=before, ends_s=tuple(clock.link_free))
