"""Ring clock: how long a token takes once tokens follow each other, by the clock of all other plans.

The token is one thread of compute that goes from rank to rank; each rank's drive is a link. A part that comes from
the drive is asked for when a slot is free: when the part that has it now has been computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.cost_models.simulate.events import (
    COMPUTE,
    PREFETCH,
    WAIT,
    Event,
    EventProgram,
    steady_seconds,
)
from gascompile.passes.parallel.ring_problem import RingProblem


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank of a ring has."""

    gpu: int = 0
    """Layers in the GPU."""
    beside: int = 0
    """Layers that are computed from RAM."""
    streamed: int = 0
    """Parts of those that come from the drive for every token."""
    slots: int = 0
    """Parts' room in RAM for them."""

    @property
    def layers(self) -> int:
        """All of its layers."""
        return self.gpu + self.beside


@dataclass(frozen=True, slots=True)
class Ring:
    """A placement: shares by device, rounds, and where the head is."""

    shares: tuple[Share, ...]
    rounds: int
    head: tuple[int, bool]
    """The device, and whether in its GPU."""


def windows(ring: Ring) -> list[list[Share]]:
    """Return what each device computes in each round; rounds are as even as they can be."""
    rounds = ring.rounds

    def part(count: int, number: int) -> int:
        return count * (number + 1) // rounds - count * number // rounds

    return [
        [Share(part(s.gpu, i), part(s.beside, i), part(s.streamed, i)) for s in ring.shares]
        for i in range(rounds)
    ]


def fill(
    problem: RingProblem, device: int, head: tuple[int, bool], gpu: int, beside: int, slots: int
) -> Share | None:
    """Return a share of so many layers, with as many parts in RAM as fit beside the slots; ``None`` without room."""
    gpu_room, _ = problem.room(device, head)
    room, total = problem.parts_room(device, head, beside), beside * problem.parts
    if gpu < 0 or beside < 0 or gpu > max(gpu_room, 0) or (beside and room < 0):
        return None
    if total <= room or not beside:
        return Share(gpu, beside, 0, 0)
    if not 1 <= slots <= room or math.isinf(problem.devices[device].load_s):
        return None
    streamed = total - (room - slots)
    return Share(gpu, beside, streamed, min(slots, streamed))


def ring_seconds(problem: RingProblem, ring: Ring) -> float:
    """Return the seconds from one token to the next in the steady state."""
    devices, parts = problem.devices, problem.parts
    events: list[Event] = [(COMPUTE, 0, problem.head_s(ring.head))]
    first = _first_copies(ring)
    used = [0] * len(devices)
    at = ring.head[0]
    for window in windows(ring):
        for i in _order(len(devices), ring.head[0]):
            now, device, share = window[i], devices[i], ring.shares[i]
            # A part that comes belongs to a layer of an earlier or a later round at times: only its bytes count.
            if not (now.layers or now.streamed):
                continue
            part_s = device.ram_s / parts if share.beside else 0.0
            resident_s = (now.beside * parts - now.streamed) * part_s
            kept_s = (now.gpu * device.gpu_s if now.gpu else 0.0) + max(0.0, resident_s)
            events += [(COMPUTE, 0, problem.hops_s[at][i]), (COMPUTE, 0, kept_s)]
            at = i
            for _ in range(now.streamed):
                copy = first[i] + used[i] % share.streamed
                ahead = first[i] + (used[i] + share.slots) % share.streamed
                events += [(WAIT, copy, 0.0), (COMPUTE, 0, part_s)]
                events.append((PREFETCH, ahead, device.load_s / parts))
                used[i] += 1
    events.append((COMPUTE, 0, problem.hops_s[at][ring.head[0]]))
    num_copies = sum(share.streamed for share in ring.shares)
    links = [i for i, share in enumerate(ring.shares) for _ in range(share.streamed)]
    program = EventProgram(events, links, [()] * num_copies, True, len(devices), 0)
    return steady_seconds(program)


def _order(count: int, head: int) -> Sequence[int]:
    """Return the devices in the order of the ring, from the head on."""
    return [*range(head, count), *range(head)]


def _first_copies(ring: Ring) -> list[int]:
    sums = [0]
    for share in ring.shares:
        sums.append(sums[-1] + share.streamed)
    return sums


def drives_s(problem: RingProblem, ring: Ring) -> list[float]:
    """Return how long each rank's drive is at work for a token."""
    return [
        share.streamed * device.load_s / problem.parts if share.streamed else 0.0
        for share, device in zip(ring.shares, problem.devices, strict=True)
    ]
