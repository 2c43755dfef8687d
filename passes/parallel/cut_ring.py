"""Cut ring: which rank has how many layers, kept where, in how many rounds; with a bound on every such cut.

Integers per device m: n_m layers in the GPU, b_m beside it, of which s_m parts of P per layer come from the drive into
c_m slots; u_m: it takes part.

    minimise T
    T >= head + sum (gpu_m n_m + ram_m b_m) + k sum hop_m u_m        a token is computed by one rank at a time
    T >= load_m s_m / P                                              a drive brings all of its parts for each token
    sum (n_m + b_m) = L,  n_m <= N_m u_m,  b_m <= L u_m,  s_m <= k c_m
    cache b_m + part (P b_m - s_m + c_m) <= RAM_m

The row of slots lets a drive be at work all the time: with k rounds, each slot is filled k times per token. It is left
out of the bound, as are the slots' room and the hops of all rounds but one. What the clock says of a cut counts, and
from the best few it goes on by the clock alone. A ring of one rank has no hops and is a program of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gascompile.core.errors import InfeasiblePlanError
from gascompile.passes.bounds.linear_program import Ending, LinearProgram, Outcome
from gascompile.passes.parallel.ring_clock import Ring, Share, fill, ring_seconds
from gascompile.passes.parallel.ring_problem import RingDevice, RingProblem

ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""[Empirical] Of home rings of 30B to 72B the best had 1 to 8 rounds; past 20 hops cost more than slots save."""
_STEPS = (-8, -2, -1, 1, 2, 8)
"""Slots that the search by the clock takes or gives at once."""
_MOST_PAIRED = 12
"""Ranks up to which it also moves layers between any two: their number goes with the square."""
_UNIT = 1e6
"""Bytes in the rows of memory: the solver's tolerances are for numbers near one."""
_MAX_NODES = 20_000
"""In place of a time limit, so that equal inputs give equal plans; [Empirical] rings of four devices take below 200."""


@dataclass(frozen=True, slots=True)
class RingCut:
    """A ring, its seconds by the clock, and what no cut beats."""

    ring: Ring
    seconds: float
    bound_s: float


def cut_ring(problem: RingProblem) -> RingCut:
    """Return the best cut that is found, over rings of several ranks and of one.

    Raises:
        InfeasiblePlanError: the head fits nowhere, or layers are left over and no rank has a drive.
    """
    cuts = [*cuts_of_one(problem).values()]
    if len(problem.devices) > 1:
        cuts += _cut_of_several(problem)
    if not cuts:
        raise _too_small(problem)
    best = min(cuts, key=lambda cut: cut.seconds)
    bound_s = min(cut.bound_s for cut in cuts)
    return RingCut(best.ring, best.seconds, min(bound_s, best.seconds))


def cuts_of_one(problem: RingProblem) -> dict[int, RingCut]:
    """Return the cut on each rank alone that can; of ranks that are the same, on the first."""
    cuts: dict[int, RingCut] = {}
    seen: set[RingDevice] = set()
    for i, device in enumerate(problem.devices):
        alike = replace(device, rank="", host="")
        if alike in seen:
            continue
        seen.add(alike)
        alone = replace(problem, devices=(device,), hops_s=((0.0,),))
        for cut in _cut_of_several(alone):
            shares = [Share()] * len(problem.devices)
            shares[i] = cut.ring.shares[0]
            ring = Ring(tuple(shares), cut.ring.rounds, (i, cut.ring.head[1]))
            cuts[i] = RingCut(ring, cut.seconds, cut.bound_s)
    return cuts


def _cut_of_several(problem: RingProblem) -> list[RingCut]:
    """Return the best cut in which every rank of the ring that is used costs a hop; none where there is none."""
    bound_s = math.inf
    best: tuple[float, Ring] | None = None
    for head in problem.heads():
        program, _ = _program(problem, head, None)
        relaxed = program.solve(time_limit_s=60.0, max_nodes=_MAX_NODES)
        bound_s = min(bound_s, relaxed.bound)
        if relaxed.ending is Ending.INFEASIBLE or (best and relaxed.bound >= best[0]):
            continue
        for ring in _candidates(problem, head):
            best = _better(problem, best, ring)
    if best is None:
        return []
    seconds, ring = _improved(problem, *best)
    return [RingCut(ring, seconds, min(bound_s, seconds))]


def _candidates(problem: RingProblem, head: tuple[int, bool]) -> Iterator[Ring]:
    for rounds in ROUNDS:
        if rounds > problem.chain.num_layers:
            return
        program, columns = _program(problem, head, rounds)
        outcome = program.solve(time_limit_s=60.0, max_nodes=_MAX_NODES)
        if outcome.ending is Ending.INFEASIBLE or not outcome.values:
            continue
        if (ring := _ring(problem, outcome, columns, rounds, head)) is not None:
            yield ring


def _better(
    problem: RingProblem, best: tuple[float, Ring] | None, ring: Ring
) -> tuple[float, Ring] | None:
    seconds = ring_seconds(problem, ring)
    # Of rings that are as fast, the one with fewer rounds.
    return (seconds, ring) if best is None or seconds < best[0] * (1 - 1e-9) else best


def _improved(problem: RingProblem, seconds: float, ring: Ring) -> tuple[float, Ring]:
    """Return the ring after changes that the clock likes, one at a time."""
    moving = True
    while moving:
        moving = False
        for other in _neighbours(problem, ring):
            other_s = ring_seconds(problem, other)
            if other_s < seconds * (1 - 1e-9):
                seconds, ring, moving = other_s, other, True
                break
    return seconds, ring


def _neighbours(problem: RingProblem, ring: Ring) -> Iterator[Ring]:
    """Yield rings with a round, a slot or a layer elsewhere."""
    for rounds in (ring.rounds - 1, ring.rounds + 1):
        if 1 <= rounds <= problem.chain.num_layers:
            yield Ring(ring.shares, rounds, ring.head)
    shares = ring.shares
    for i, share in enumerate(shares):
        for slots in _STEPS if share.streamed else ():
            yield from _changed(problem, ring, {i: (share.gpu, share.beside, share.slots + slots)})
    if len(shares) > _MOST_PAIRED:
        return
    for i, j in itertools.permutations(range(len(shares)), 2):
        giver, taker = shares[i], shares[j]
        for from_gpu, to_gpu in itertools.product((0, 1), (0, 1)):
            given = (giver.gpu - from_gpu, giver.beside - 1 + from_gpu, max(1, giver.slots))
            taken = (taker.gpu + to_gpu, taker.beside + 1 - to_gpu, max(1, taker.slots))
            yield from _changed(problem, ring, {i: given, j: taken})


def _changed(
    problem: RingProblem, ring: Ring, shares: dict[int, tuple[int, int, int]]
) -> Iterator[Ring]:
    """Yield the ring with other shares, if there is room for them."""
    changed = list(ring.shares)
    for i, (gpu, beside, slots) in shares.items():
        share = fill(problem, i, ring.head, gpu, beside, slots)
        if share is None:
            return
        changed[i] = share
    yield Ring(tuple(changed), ring.rounds, ring.head)


def _program(
    problem: RingProblem, head: tuple[int, bool], rounds: int | None
) -> tuple[LinearProgram, list[tuple[int, int, int]]]:
    """Return the program for a head and a number of rounds, or for the bound over all of them."""
    program = LinearProgram("ring")
    layers, parts = problem.chain.num_layers, problem.parts
    total = program.add_variable(cost=1.0)
    compute: list[tuple[int, float]] = []
    columns = []
    hop_s = _hops_s(problem, cheapest=rounds is None)
    part, cache = problem.part_bytes, problem.chain.layer.state_bytes
    for i, device in enumerate(problem.devices):
        ram = problem.free_bytes(i, head)[1]
        drive = math.isfinite(device.load_s) and ram > 0
        most = min(max(problem.room(i, head)[0], 0), layers)
        gpu = program.add_variable(0, most, integer=True)
        beside = program.add_variable(0, layers if ram >= 0 else 0, integer=True)
        streamed = program.add_variable(0, layers * parts if drive else 0, integer=True)
        slots = program.add_variable(0, layers * parts if drive else 0, integer=True)
        used = program.add_variable(int(i == head[0]), 1, integer=True)
        compute += [(gpu, _finite(device.gpu_s)), (beside, _finite(device.ram_s))]
        compute.append((used, hop_s[i] * (rounds or 1)))
        program.add_row(-math.inf, 0, [(gpu, 1), (beside, 1), (used, -layers)])
        program.add_row(-math.inf, 0, [(streamed, 1), (beside, -parts)])
        held = [(beside, (cache + parts * part) / _UNIT), (streamed, -part / _UNIT)]
        held += [(slots, part / _UNIT)] if rounds else []
        program.add_row(-math.inf, max(ram, 0) / _UNIT, held)
        if drive:
            program.add_row(0, math.inf, [(total, 1), (streamed, -device.load_s / parts)])
            # A part that comes needs a slot, in a bound as well; more slots are for time alone.
            most = rounds or layers * parts
            program.add_row(-math.inf, 0, [(streamed, 1), (slots, -most)])
        columns.append((gpu, beside, slots))
    terms = [(total, 1.0), *((column, -seconds) for column, seconds in compute)]
    program.add_row(problem.head_s(head), math.inf, terms)
    every = [(column, 1.0) for of_device in columns for column in of_device[:2]]
    program.add_row(layers, layers, every)
    return program, columns


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def _hops_s(problem: RingProblem, *, cheapest: bool) -> list[float]:
    """Return what a hop away from each device costs: to its next, or for a bound, to the nearest."""
    count = len(problem.devices)
    if count == 1:
        return [0.0]
    if cheapest:
        return [min(hops[:i] + hops[i + 1 :]) for i, hops in enumerate(problem.hops_s)]
    return [problem.hops_s[i][(i + 1) % count] for i in range(count)]


def _ring(
    problem: RingProblem,
    outcome: Outcome,
    columns: list[tuple[int, int, int]],
    rounds: int,
    head: tuple[int, bool],
) -> Ring | None:
    """Return the ring that a program has found, as full as RAM can be; ``None`` where rounding leaves no room."""
    shares = []
    for i, held in enumerate(columns):
        gpu, beside, slots = (round(outcome.values[column]) for column in held)
        share = fill(problem, i, head, gpu, beside, max(1, slots))
        if share is None:
            return None
        shares.append(share)
    return Ring(tuple(shares), rounds, head)


def _too_small(problem: RingProblem) -> InfeasiblePlanError:
    held = sum(device.gpu_bytes + device.ram_bytes for device in problem.devices)
    needed = problem.chain.head_bytes + problem.layer_bytes * problem.chain.num_layers
    return InfeasiblePlanError(
        required_bytes=max(needed, held + problem.layer_bytes),
        limit_bytes=held,
        tier="all ranks",
        op="a token",
    )
