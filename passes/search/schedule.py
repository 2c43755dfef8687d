"""Schedule: from a placement to arena addresses and the moment at which each prefetch may start.

Residents are packed at the bottom of the arena; the rest is the staging region. Staged copies take
addresses around it like in a ring, in the order of their first use, so that memory is freed in the order in
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
from gascompile.passes.model.problem import (
    Placement,
    Problem,
    StagedCopy,
    copies_s,
    staged_copies,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """What waits half the way to the arena, in the arena of a place in between."""

    place: str
    feed: int
    """The machine's link that leads there."""
    size_bytes: int
    """Of its arena."""
    copies: tuple[StagedCopy, ...]
    """From the first to the last op before which one is pushed on."""
    offsets: tuple[int, ...]
    points: tuple[int, ...]
    """Op before which the fetch of each stands, like ``Schedule.points``."""
    source_of: tuple[int | None, ...]
    """Per copy of the schedule the number of the one here that it is pushed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A placement with addresses, prefetch points and the time it takes."""

    placement: Placement
    resident_bytes: int
    """The bottom of the arena, taken by residents."""
    staging_bytes: int
    """The rest of the arena."""
    copies: tuple[StagedCopy, ...]
    offsets: tuple[int, ...]
    """Address of each copy within the staging region."""
    points: tuple[int, ...]
    """Op before which each copy's prefetch stands; negative in the iteration before."""
    seconds: float
    middle: Middle | None = None

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
    copies: Sequence[StagedCopy] | None = None,
) -> Schedule | None:
    """Return the fastest schedule found within ``staging_bytes``; ``None`` when none packs.

    A placement whose kept intervals do not pack is scheduled without them.

    Args:
        resident_bytes: size of the residents' part, by default what the placement's residents take.
        lanes: bytes of each link's part of the region; by default all links share the whole.
        copies: the placement's staged copies, where they are known.
    """
    if resident_bytes is None:
        resident_bytes = sum(
            weight.reserved_bytes
            for weight, link in zip(problem.weights, placement.link_of, strict=True)
            if link is None
        )
    best: Schedule | None = None
    for candidate in _with_and_without_kept(placement):
        if copies is None or candidate is not placement:
            copies = staged_copies(problem, candidate)
        moving = _Moving(problem, copies)
        for offsets in layouts(copies, lanes or (staging_bytes,), problem.repeats):
            earliest = points_of(copies, offsets, len(problem.op_times_s), problem.repeats)
            for points in _in_turn(problem, copies, earliest):
                seconds = steady_seconds(moving.program(points))
                if best is None or seconds < best.seconds:
                    best = Schedule(
                        placement=candidate,
                        resident_bytes=resident_bytes,
                        staging_bytes=staging_bytes,
                        copies=tuple(copies),
                        offsets=tuple(offsets),
                        points=tuple(points),
                        seconds=seconds,
                    )
        if best is not None:
            return best
    return best


def layouts(
    copies: Sequence[StagedCopy], lanes: Sequence[int], repeats: bool
) -> Iterator[tuple[int, ...]]:
    """Yield addresses of the copies: in one ring, or in one ring per link where there are more lanes."""
    members = [
        [i for i, copy in enumerate(copies) if len(lanes) == 1 or copy.link == lane]
        for lane in range(len(lanes))
    ]
    sizes = [
        _regions([copies[i] for i in inside], lane_bytes, repeats)
        for inside, lane_bytes in zip(members, lanes, strict=True)
    ]
    for chosen in dict.fromkeys((tuple(s[0] for s in sizes), tuple(s[-1] for s in sizes))):
        offsets = [0] * len(copies)
        bottom = 0
        for inside, lane_bytes, ring_bytes in zip(members, lanes, chosen, strict=True):
            ring = _ring([copies[i] for i in inside], ring_bytes)
            if ring is None:
                break
            for i, offset in zip(inside, ring, strict=True):
                offsets[i] = bottom + offset
            bottom += lane_bytes
        else:
            yield tuple(offsets)


def _in_turn(
    problem: Problem, copies: Sequence[StagedCopy], earliest: Sequence[int]
) -> list[Sequence[int]]:
    """Return the earliest points and, where used links share a pipe, those of one load at a time."""
    used = {copy.link for copy in copies}
    pipes = [pipe for link in used for pipe in problem.links[link].shared]
    if len(pipes) == len(set(pipes)):
        return [earliest]
    before: dict[int, int] = {}
    if problem.repeats:
        before = {copy.link: copy.start - len(problem.op_times_s) for copy in copies}
    late: list[int] = []
    for copy, point in zip(copies, earliest, strict=True):
        late.append(max(point, before.get(copy.link, 0)))
        before[copy.link] = copy.start
    return [earliest] if late == earliest else [earliest, late]


def _with_and_without_kept(placement: Placement) -> list[Placement]:
    if not placement.kept:
        return [placement]
    plain = Placement(strategy=placement.strategy, link_of=placement.link_of)
    return [placement, plain]


def _regions(copies: Sequence[StagedCopy], staging_bytes: int, repeats: bool) -> list[int]:
    """Return ring sizes to try: all of the region, and the least that needs no more laps.

    With the latter the last lap is as full as the others, so that the first copies of the next
    iteration find the bottom of the region long free.
    """
    if not repeats or not copies:
        return [staging_bytes]
    laps = _laps(copies, staging_bytes)
    low, high = max(copy.reserved_bytes for copy in copies) - 1, staging_bytes
    while high - low > max(staging_bytes >> 8, 1):
        middle = (low + high) // 2
        if _laps(copies, middle) <= laps:
            high = middle
        else:
            low = middle
    return [staging_bytes] if high == staging_bytes else [staging_bytes, high]


def _laps(copies: Sequence[StagedCopy], region_bytes: int) -> int:
    laps, pointer = 1, 0
    for copy in copies:
        if pointer + copy.reserved_bytes > region_bytes:
            laps, pointer = laps + 1, 0
        pointer += copy.reserved_bytes
    return laps


def _ring(copies: Sequence[StagedCopy], region_bytes: int) -> list[int] | None:
    """Return an address per copy such that copies that are in use together do not overlap."""
    offsets: dict[int, int] = {}
    long = [i for i, copy in enumerate(copies) if copy.end > copy.start]
    for i in long:
        rivals = [j for j in long if j in offsets and _in_use_together(copies[i], copies[j])]
        address = _lowest_free_address(copies, offsets, i, rivals, 0, region_bytes)
        if address is None:
            return None
        offsets[i] = address
    pointer = 0
    begin = 0
    while begin < len(copies):
        end = begin
        while end < len(copies) and copies[end].start == copies[begin].start:
            end += 1
        op = copies[begin].start
        group = [i for i in range(begin, end) if copies[i].end == op]
        rivals = [j for j in long if copies[j].start <= op <= copies[j].end]
        placed = _place_group(copies, offsets, group, rivals, pointer, region_bytes)
        if placed is None:
            placed = _place_group(copies, offsets, group, rivals, 0, region_bytes)
        if placed is None:
            return None
        pointer = placed
        begin = end
    return [offsets[i] for i in range(len(copies))]


def _place_group(
    copies: Sequence[StagedCopy],
    offsets: dict[int, int],
    group: Sequence[int],
    rivals: Sequence[int],
    pointer: int,
    region_bytes: int,
) -> int | None:
    """Place the copies of one op from ``pointer`` on; return where the last one ends."""
    taken = list(rivals)
    for i in group:
        address = _lowest_free_address(copies, offsets, i, taken, pointer, region_bytes)
        if address is None and pointer:
            address = _lowest_free_address(copies, offsets, i, taken, 0, region_bytes)
        if address is None:
            return None
        offsets[i] = address
        taken.append(i)
        pointer = address + copies[i].reserved_bytes
    return pointer


def _lowest_free_address(
    copies: Sequence[StagedCopy],
    offsets: dict[int, int],
    i: int,
    rivals: Sequence[int],
    address: int,
    region_bytes: int,
) -> int | None:
    """Return the lowest address from ``address`` on at which copy ``i`` overlaps none of its rivals."""
    size = copies[i].reserved_bytes
    moved = True
    while moved:
        moved = False
        for j in rivals:
            if offsets[j] < address + size and address < offsets[j] + copies[j].reserved_bytes:
                address = offsets[j] + copies[j].reserved_bytes
                moved = True
    return address if address + size <= region_bytes else None


def _in_use_together(one: StagedCopy, other: StagedCopy) -> bool:
    return one.start <= other.end and other.start <= one.end


def points_of(
    copies: Sequence[StagedCopy], offsets: Sequence[int], num_ops: int, repeats: bool
) -> list[int]:
    """Return the earliest point of each prefetch: when all in its way is released.

    In the way are copies that overlap, and the weight's own previous one: a weight has one at a time.
    """
    releases = [(copy.end + 1, i) for i, copy in enumerate(copies)]
    if repeats:
        releases += [(release - num_ops, i) for release, i in releases]
    releases.sort()
    times = [release for release, _ in releases]
    points: list[int] = []
    for i, copy in enumerate(copies):
        begin, end = offsets[i], offsets[i] + copy.reserved_bytes
        # The copy of the iteration before ends here, so no earlier release can matter.
        point = copy.end + 1 - num_ops if repeats else 0
        k = bisect_right(times, copy.start) - 1
        while k >= 0 and times[k] > point:
            j = releases[k][1]
            overlaps = offsets[j] < end and begin < offsets[j] + copies[j].reserved_bytes
            if overlaps or copies[j].weight == copy.weight:
                point = times[k]
                break
            k -= 1
        points.append(point)
    return points


def _links(problem: Problem, copies: Sequence[StagedCopy]) -> EventProgram:
    """Return a program without events: what the loads of the copies take of links and pipes."""
    order = {link.name: i for i, link in enumerate(problem.machine.links)}
    numbers = [order[link.name] for link in problem.links]
    known: dict[tuple[int, int], Pipes] = {}
    pipes_of: list[Pipes] = []
    for copy in copies:
        key = (problem.weights[copy.weight].size_bytes, copy.link)
        if key not in known:
            known[key] = problem.pipes(copy.weight, copy.link)
        pipes_of.append(known[key])
    return EventProgram(
        events=(),
        link_of=[numbers[copy.link] for copy in copies],
        pipes_of=pipes_of,
        repeats=problem.repeats,
        num_links=len(problem.machine.links),
        num_pipes=len(problem.machine.pipes),
    )


class _Moving:
    """The moves of staged copies as events, whose parts are made once for all points that they may stand at."""

    def __init__(self, problem: Problem, copies: Sequence[StagedCopy]) -> None:
        self._copies, self._sums_s = copies, problem.sums_s
        self._links = _links(problem, copies)
        self._prefetches = [
            (PREFETCH, i, time_s) for i, time_s in enumerate(copies_s(problem, copies))
        ]
        self._waits: dict[int, list[Event]] = {}
        for i, copy in enumerate(copies):
            self._waits.setdefault(copy.start, []).append((WAIT, i, 0.0))

    def program(self, points: Sequence[int]) -> EventProgram:
        """Return the events of one iteration, as ``cost_models.replay`` would make them from the steps."""
        sums_s, waits = self._sums_s, self._waits
        started = start_points(self._copies, points, len(sums_s) - 1)
        events: list[Event] = []
        begun = 0
        for point in sorted(started.keys() | waits.keys()):
            if point > begun:
                events.append((COMPUTE, begun, sums_s[point] - sums_s[begun]))
                begun = point
            events += [self._prefetches[i] for i in started.get(point, ())]
            events += waits.get(point, ())
        if len(sums_s) - 1 > begun:
            events.append((COMPUTE, begun, sums_s[-1] - sums_s[begun]))
        return replace(self._links, events=events)


def program_points(
    copies: Sequence[StagedCopy], points: Sequence[int], num_ops: int
) -> dict[int, tuple[list[int], list[int]]]:
    """Return per op the copies whose prefetch and whose waits stand before it, in order."""
    moves: dict[int, tuple[list[int], list[int]]] = {}
    for op, started in start_points(copies, points, num_ops).items():
        moves[op] = (started, [])
    for i, copy in enumerate(copies):
        moves.setdefault(copy.start, ([], []))[1].append(i)
    return moves


def start_points(
    copies: Sequence[StagedCopy], points: Sequence[int], num_ops: int
) -> dict[int, list[int]]:
    """Return per op the copies whose load stands before it, in order."""
    started: dict[int, list[int]] = {}
    starts = [copy.start for copy in copies]
    order = sorted(range(len(copies)), key=starts.__getitem__)
    for i in order:
        if points[i] >= 0:
            started.setdefault(points[i], []).append(i)
    # Those of the iteration after stand behind.
    for i in order:
        if points[i] < 0:
            started.setdefault(points[i] + num_ops, []).append(i)
    return started
