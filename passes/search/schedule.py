"""Schedule: from a placement to arena addresses and the moment at which each prefetch may start.

Residents are packed at the bottom of the arena; the rest is the staging region. Visits take addresses
around it like in a ring, in the order of their first use, so that memory is freed in the order in
which it is taken; or each link has a part of the region, a *lane*, with a ring of its own, so that the
long loads of a slow link do not hold up the others. Addresses are the same in every iteration.
A prefetch stands at the earliest point of the program at which its address range is free, at most one
iteration ahead. Where links share a pipe, which serves them in the order of their prefetches, it may
also stand where the load before it on its link is waited for: earlier it would only block the pipe.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gascompile.cost_models.simulate.clock import Pipes
from gascompile.cost_models.simulate.events import (
    COMPUTE,
    PREFETCH,
    WAIT,
    Event,
    EventProgram,
    steady_seconds,
)
from gascompile.passes.model.problem import Placement, Problem, Visit, visits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A placement with addresses, prefetch points and the time it takes."""

    placement: Placement
    resident_bytes: int
    """The bottom of the arena, taken by residents."""
    staging_bytes: int
    """The rest of the arena."""
    visits: tuple[Visit, ...]
    offsets: tuple[int, ...]
    """Address of each visit within the staging region."""
    points: tuple[int, ...]
    """Op before which each visit's prefetch stands; negative in the iteration before."""
    seconds: float

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self.resident_bytes + self.staging_bytes

    def with_staging(self, staging_bytes: int) -> Schedule:
        """Return the schedule in a larger staging region."""
        return replace(self, staging_bytes=staging_bytes)

    def with_seconds(self, seconds: float) -> Schedule:
        """Return the schedule with its time corrected for rounding."""
        return replace(self, seconds=seconds)


def schedule(
    problem: Problem,
    placement: Placement,
    staging_bytes: int,
    *,
    resident_bytes: int | None = None,
    lanes: Sequence[int] = (),
) -> Schedule | None:
    """Return the fastest schedule found within ``staging_bytes``; ``None`` when none packs.

    A placement whose kept intervals do not pack is scheduled without them.

    Args:
        resident_bytes: size of the residents' part, by default what the placement's residents take.
        lanes: bytes of each link's part of the region; by default all links share the whole.
    """
    if resident_bytes is None:
        resident_bytes = sum(
            weight.reserved_bytes
            for weight, link in zip(problem.weights, placement.link_of, strict=True)
            if link is None
        )
    best: Schedule | None = None
    for candidate in _with_and_without_kept(placement):
        visits = visits_of(problem, candidate)
        links = _links(problem, visits)
        for offsets in _layouts(visits, lanes or (staging_bytes,), problem.repeats):
            earliest = _points(visits, offsets, len(problem.op_times_s), problem.repeats)
            for points in _in_turn(problem, visits, earliest):
                seconds = steady_seconds(_events(problem, visits, points, links))
                if best is None or seconds < best.seconds:
                    best = Schedule(
                        placement=candidate,
                        resident_bytes=resident_bytes,
                        staging_bytes=staging_bytes,
                        visits=tuple(visits),
                        offsets=tuple(offsets),
                        points=tuple(points),
                        seconds=seconds,
                    )
        if best is not None:
            return best
    return best


def _layouts(
    visits: Sequence[Visit], lanes: Sequence[int], repeats: bool
) -> Iterator[tuple[int, ...]]:
    """Yield addresses of the visits: in one ring, or in one ring per link where there are more lanes."""
    members = [
        [i for i, visit in enumerate(visits) if len(lanes) == 1 or visit.link == lane]
        for lane in range(len(lanes))
    ]
    sizes = [
        _regions([visits[i] for i in inside], lane_bytes, repeats)
        for inside, lane_bytes in zip(members, lanes, strict=True)
    ]
    for chosen in dict.fromkeys((tuple(s[0] for s in sizes), tuple(s[-1] for s in sizes))):
        offsets = [0] * len(visits)
        bottom = 0
        for inside, lane_bytes, ring_bytes in zip(members, lanes, chosen, strict=True):
            ring = _ring([visits[i] for i in inside], ring_bytes)
            if ring is None:
                break
            for i, offset in zip(inside, ring, strict=True):
                offsets[i] = bottom + offset
            bottom += lane_bytes
        else:
            yield tuple(offsets)


def _in_turn(
    problem: Problem, visits: Sequence[Visit], earliest: Sequence[int]
) -> list[Sequence[int]]:
    """Return the earliest points and, where used links share a pipe, those of one load at a time."""
    used = {visit.link for visit in visits}
    pipes = [pipe for link in used for pipe in problem.links[link].shared]
    if len(pipes) == len(set(pipes)):
        return [earliest]
    before: dict[int, int] = {}
    if problem.repeats:
        before = {visit.link: visit.start - len(problem.op_times_s) for visit in visits}
    late: list[int] = []
    for visit, point in zip(visits, earliest, strict=True):
        late.append(max(point, before.get(visit.link, 0)))
        before[visit.link] = visit.start
    return [earliest] if late == earliest else [earliest, late]


def _with_and_without_kept(placement: Placement) -> list[Placement]:
    if not placement.kept:
        return [placement]
    plain = Placement(strategy=placement.strategy, link_of=placement.link_of)
    return [placement, plain]


def _regions(visits: Sequence[Visit], staging_bytes: int, repeats: bool) -> list[int]:
    """Return ring sizes to try: all of the region, and the least that needs no more laps.

    With the latter the last lap is as full as the others, so that the first visits of the next
    iteration find the bottom of the region long free.
    """
    if not repeats or not visits:
        return [staging_bytes]
    laps = _laps(visits, staging_bytes)
    low, high = max(visit.reserved_bytes for visit in visits) - 1, staging_bytes
    while high - low > max(staging_bytes >> 8, 1):
        middle = (low + high) // 2
        if _laps(visits, middle) <= laps:
            high = middle
        else:
            low = middle
    return [staging_bytes] if high == staging_bytes else [staging_bytes, high]


def _laps(visits: Sequence[Visit], region_bytes: int) -> int:
    laps, pointer = 1, 0
    for visit in visits:
        if pointer + visit.reserved_bytes > region_bytes:
            laps, pointer = laps + 1, 0
        pointer += visit.reserved_bytes
    return laps


def _ring(visits: Sequence[Visit], region_bytes: int) -> list[int] | None:
    """Return an address per visit such that visits that are in use together do not overlap."""
    offsets: dict[int, int] = {}
    long = [i for i, visit in enumerate(visits) if visit.end > visit.start]
    for i in long:
        rivals = [j for j in long if j in offsets and _in_use_together(visits[i], visits[j])]
        address = _first_fit(visits, offsets, i, rivals, 0, region_bytes)
        if address is None:
            return None
        offsets[i] = address
    pointer = 0
    begin = 0
    while begin < len(visits):
        end = begin
        while end < len(visits) and visits[end].start == visits[begin].start:
            end += 1
        op = visits[begin].start
        group = [i for i in range(begin, end) if visits[i].end == op]
        rivals = [j for j in long if visits[j].start <= op <= visits[j].end]
        placed = _place_group(visits, offsets, group, rivals, pointer, region_bytes)
        if placed is None:
            placed = _place_group(visits, offsets, group, rivals, 0, region_bytes)
        if placed is None:
            return None
        pointer = placed
        begin = end
    return [offsets[i] for i in range(len(visits))]


def _place_group(
    visits: Sequence[Visit],
    offsets: dict[int, int],
    group: Sequence[int],
    rivals: Sequence[int],
    pointer: int,
    region_bytes: int,
) -> int | None:
    """Place the visits of one op from ``pointer`` on; return where the last one ends."""
    taken = list(rivals)
    for i in group:
        address = _first_fit(visits, offsets, i, taken, pointer, region_bytes)
        if address is None and pointer:
            address = _first_fit(visits, offsets, i, taken, 0, region_bytes)
        if address is None:
            return None
        offsets[i] = address
        taken.append(i)
        pointer = address + visits[i].reserved_bytes
    return pointer


def _first_fit(
    visits: Sequence[Visit],
    offsets: dict[int, int],
    i: int,
    rivals: Sequence[int],
    address: int,
    region_bytes: int,
) -> int | None:
    size = visits[i].reserved_bytes
    moved = True
    while moved:
        moved = False
        for j in rivals:
            if offsets[j] < address + size and address < offsets[j] + visits[j].reserved_bytes:
                address = offsets[j] + visits[j].reserved_bytes
                moved = True
    return address if address + size <= region_bytes else None


def _in_use_together(one: Visit, other: Visit) -> bool:
    return one.start <= other.end and other.start <= one.end


def _points(
    visits: Sequence[Visit], offsets: Sequence[int], num_ops: int, repeats: bool
) -> list[int]:
    """Return the earliest point of each prefetch: when all in its way is released.

    In the way are visits that overlap, and the weight's own previous visit: a weight has one copy.
    """
    releases = [(visit.end + 1, i) for i, visit in enumerate(visits)]
    if repeats:
        releases += [(release - num_ops, i) for release, i in releases]
    releases.sort()
    times = [release for release, _ in releases]
    points: list[int] = []
    for i, visit in enumerate(visits):
        begin, end = offsets[i], offsets[i] + visit.reserved_bytes
        # A visit's own last stay ends here, so no earlier release can matter.
        point = visit.end + 1 - num_ops if repeats else 0
        k = bisect_right(times, visit.start) - 1
        while k >= 0 and times[k] > point:
            j = releases[k][1]
            overlaps = offsets[j] < end and begin < offsets[j] + visits[j].reserved_bytes
            if overlaps or visits[j].weight == visit.weight:
                point = times[k]
                break
            k -= 1
        points.append(point)
    return points


def _links(problem: Problem, visits: Sequence[Visit]) -> EventProgram:
    """Return a program without events: what the loads of the visits take of links and pipes."""
    order = {link.name: i for i, link in enumerate(problem.machine.links)}
    numbers = [order[link.name] for link in problem.links]
    known: dict[tuple[int, int], Pipes] = {}
    pipes_of: list[Pipes] = []
    for visit in visits:
        key = (problem.weights[visit.weight].size_bytes, visit.link)
        if key not in known:
            known[key] = problem.pipes(visit.weight, visit.link)
        pipes_of.append(known[key])
    return EventProgram(
        events=(),
        link_of=[numbers[visit.link] for visit in visits],
        pipes_of=pipes_of,
        repeats=problem.repeats,
        num_links=len(problem.machine.links),
        num_pipes=len(problem.machine.pipes),
    )


def _events(
    problem: Problem, visits: Sequence[Visit], points: Sequence[int], links: EventProgram
) -> EventProgram:
    """Return the events of one iteration, as ``cost_models.replay`` would make them from the steps."""
    moves = program_points(visits, points, len(problem.op_times_s))
    events: list[Event] = []
    seconds = [problem.transfer_s(visit.weight, visit.link) for visit in visits]
    sums = problem.sums_s
    begun = 0
    for point in sorted(moves):
        if point > begun:
            events.append((COMPUTE, begun, sums[point] - sums[begun]))
            begun = point
        prefetches, waits = moves[point]
        events += [(PREFETCH, i, seconds[i]) for i in prefetches]
        events += [(WAIT, i, 0.0) for i in waits]
    if len(sums) - 1 > begun:
        events.append((COMPUTE, begun, sums[-1] - sums[begun]))
    return replace(links, events=events)


def program_points(
    visits: Sequence[Visit], points: Sequence[int], num_ops: int
) -> dict[int, tuple[list[int], list[int]]]:
    """Return per op the visits whose prefetch and whose waits stand before it, in order."""
    moves: dict[int, tuple[list[int], list[int]]] = {}
    for i in sorted(range(len(visits)), key=lambda i: (points[i] < 0, visits[i].start, i)):
        point = points[i] + num_ops if points[i] < 0 else points[i]
        moves.setdefault(point, ([], []))[0].append(i)
    for i, visit in enumerate(visits):
        moves.setdefault(visit.start, ([], []))[1].append(i)
    return moves
