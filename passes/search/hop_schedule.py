"""Hop schedule: a placement whose weights of one place come in two hops, with an arena half the way.

The first hop reads a weight into the arena in between as soon as there is room, however full the one that computes
is; the second pushes it on over a faster link once there is room at its end. Both arenas are laid out as rings. A
weight that is used several times may stay half the way from one use to the next, and is then read once for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gascompile.cost_models.simulate.clock import Pipes, pipe_times
from gascompile.cost_models.simulate.events import (
    COMPUTE,
    PREFETCH,
    PUSH,
    WAIT,
    Event,
    EventProgram,
    steady_seconds,
)
from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.model.problem import Placement, Problem, StagedCopy, staged_copies
from gascompile.passes.search.schedule import (
    Middle,
    Schedule,
    layouts,
    points_of,
    program_points,
    start_points,
)


@dataclass(frozen=True, slots=True)
class Hop:
    """A way in two hops, by numbers."""

    home: int
    """The problem's link that leads there directly."""
    push: int
    """The problem's link of the second hop."""
    feed: int
    """The machine's link of the first hop."""
    place: str
    """In between."""


def hops(problem: Problem) -> tuple[Hop, ...]:
    """Return the ways in two hops that a problem's machine has."""
    into = {link.source_tier: i for i, link in reversed(list(enumerate(problem.links)))}
    numbers = {link.name: i for i, link in enumerate(problem.machine.links)}
    return tuple(
        Hop(into[feed.source_tier], into[push.source_tier], numbers[feed.name], push.source_tier)
        for feed, push in problem.machine.two_hops()
        if feed.source_tier in into and push.source_tier in into
    )


@dataclass(frozen=True, slots=True)
class HopCopies:
    """The copies of a placement: those where ops compute, and those half the way."""

    copies: tuple[StagedCopy, ...]
    fetched: tuple[StagedCopy, ...]
    source_of: tuple[int | None, ...]
    """Per copy the number of the fetched one that it is pushed from."""


def hop_copies(problem: Problem, placement: Placement, hop: Hop, reach: int) -> HopCopies:
    """Return the copies where all that comes from a hop's home makes its way in two.

    Args:
        problem: what is planned.
        placement: links are those of homes.
        hop: the way.
        reach: streamed copies of others, within which a weight stays half the way from one of its own to the next.
    """
    plain = staged_copies(problem, placement)
    copies = [replace(c, link=hop.push) if c.link == hop.home else c for c in plain]
    latest: dict[int, int] = {}
    groups: list[list[int]] = []
    group_of: dict[int, int] = {}
    for i, copy in enumerate(plain):
        if copy.link != hop.home:
            continue
        before = latest.get(copy.weight)
        if before is not None and i - before <= reach:
            group_of[i] = group_of[before]
            groups[group_of[i]].append(i)
        else:
            group_of[i] = len(groups)
            groups.append([i])
        latest[copy.weight] = i
    fetched = tuple(
        StagedCopy(
            plain[group[0]].weight,
            hop.feed,
            plain[group[0]].start,
            plain[group[-1]].start,
            plain[group[0]].reserved_bytes,
        )
        for group in groups
    )
    return HopCopies(tuple(copies), fetched, tuple(group_of.get(i) for i in range(len(copies))))


def hop_bound_s(problem: Problem, made: HopCopies) -> float:
    """Return a time that no schedule of these copies beats: ops, a link or a pipe."""
    machine = problem.machine
    link_s = [0.0] * len(machine.links)
    pipe_s = [0.0] * len(machine.pipes)
    rates = [pipe_rate(machine, pipe) for pipe in machine.pipes]
    numbers = {link.name: i for i, link in enumerate(machine.links)}
    for copy, link in _on_links(problem, made, numbers):
        size_bytes = problem.weights[copy.weight].size_bytes
        link_s[link] += machine.links[link].transfer_time_s(size_bytes)
        for number, pipe in enumerate(machine.pipes):
            if pipe.name in machine.links[link].shared:
                pipe_s[number] += size_bytes / rates[number]
    return max(problem.compute_s, *link_s, *pipe_s)


def _on_links(
    problem: Problem, made: HopCopies, numbers: dict[str, int]
) -> list[tuple[StagedCopy, int]]:
    """Return all copies with the number of the machine's link that each takes."""
    into = [numbers[link.name] for link in problem.links]
    here = [(copy, into[copy.link]) for copy in made.copies]
    return [*here, *((copy, copy.link) for copy in made.fetched)]


def hop_schedule(
    problem: Problem,
    placement: Placement,
    hop: Hop,
    made: HopCopies,
    *,
    resident_bytes: int,
    staging_bytes: int,
    middle_bytes: int,
) -> Schedule | None:
    """Return the fastest schedule of copies in arenas of these sizes; ``None`` when they do not pack."""
    num_ops, repeats = len(problem.op_times_s), problem.repeats
    links = _links(problem, made)
    best: Schedule | None = None
    for offsets in layouts(made.copies, (staging_bytes,), repeats):
        free = points_of(made.copies, offsets, num_ops, repeats)
        for addresses in layouts(made.fetched, (middle_bytes,), repeats):
            fetches = points_of(made.fetched, addresses, num_ops, repeats)
            points = tuple(
                point if source is None else max(point, fetches[source])
                for point, source in zip(free, made.source_of, strict=True)
            )
            seconds = steady_seconds(_events(problem, made, points, fetches, links))
            if best is None or seconds < best.seconds:
                best = Schedule(
                    placement=placement,
                    resident_bytes=resident_bytes,
                    staging_bytes=staging_bytes,
                    copies=made.copies,
                    offsets=offsets,
                    points=points,
                    seconds=seconds,
                    middle=Middle(
                        place=hop.place,
                        feed=hop.feed,
                        size_bytes=middle_bytes,
                        copies=made.fetched,
                        offsets=addresses,
                        points=tuple(fetches),
                        source_of=made.source_of,
                    ),
                )
    return best


def _links(problem: Problem, made: HopCopies) -> EventProgram:
    """Return a program without events: what copies take of links and pipes, those half the way behind the others."""
    machine = problem.machine
    numbers = {link.name: i for i, link in enumerate(machine.links)}
    every = _on_links(problem, made, numbers)
    known: dict[tuple[int, int], Pipes] = {}
    pipes_of: list[Pipes] = []
    for copy, link in every:
        key = (problem.weights[copy.weight].size_bytes, link)
        if key not in known:
            known[key] = pipe_times(machine, machine.links[link], key[0])
        pipes_of.append(known[key])
    return EventProgram(
        events=(),
        link_of=[link for _, link in every],
        pipes_of=pipes_of,
        repeats=problem.repeats,
        num_links=len(machine.links),
        num_pipes=len(machine.pipes),
        source_of={
            i: len(made.copies) + source
            for i, source in enumerate(made.source_of)
            if source is not None
        },
    )


def _events(
    problem: Problem,
    made: HopCopies,
    points: Sequence[int],
    fetches: Sequence[int],
    links: EventProgram,
) -> EventProgram:
    """Return the events of one iteration, as ``cost_models.replay`` would make them from the steps."""
    num_ops, first = len(problem.op_times_s), len(made.copies)
    moves = program_points(made.copies, points, num_ops)
    started = start_points(made.fetched, fetches, num_ops)
    seconds = [problem.transfer_s(copy.weight, copy.link) for copy in made.copies]
    feed_s = [
        problem.machine.links[copy.link].transfer_time_s(problem.weights[copy.weight].size_bytes)
        for copy in made.fetched
    ]
    events: list[Event] = []
    sums, begun = problem.sums_s, 0
    for point in sorted({*moves, *started}):
        if point > begun:
            events.append((COMPUTE, begun, sums[point] - sums[begun]))
            begun = point
        events += [(PREFETCH, first + i, feed_s[i]) for i in started.get(point, ())]
        prefetches, waits = moves.get(point, ([], []))
        events += [
            (PREFETCH if made.source_of[i] is None else PUSH, i, seconds[i]) for i in prefetches
        ]
        events += [(WAIT, i, 0.0) for i in waits]
    if len(sums) - 1 > begun:
        events.append((COMPUTE, begun, sums[-1] - sums[begun]))
    return replace(links, events=events)


def homes_of(
    problem: Problem, residents: Collection[int], hop: Hop, held_bytes: int, *, strategy: str
) -> Placement | None:
    """Return a placement with ``held_bytes`` of the streamed weights at home in between, spread evenly.

    The others are at the hop's home; ``None`` where they do not fit there.
    """
    streamed = [i for i in range(len(problem.weights)) if i not in residents]
    sizes = [problem.weights[i].size_bytes for i in streamed]
    total = sum(sizes)
    share = min(held_bytes / total, 1.0) if total else 0.0
    link_of: list[int | None] = [None] * len(problem.weights)
    owed, left = 0.0, held_bytes
    for i, size in zip(streamed, sizes, strict=True):
        owed += share * size
        stays = left >= size and owed >= size * (1 - 1e-9)
        link_of[i] = hop.push if stays else hop.home
        if stays:
            owed -= size
            left -= size
    for i, size in zip(streamed, sizes, strict=True):
        # What is left holds one or two more.
        if link_of[i] == hop.home and size <= left:
            link_of[i], left = hop.push, left - size
    return _with_room(problem, link_of, hop, strategy)


def most_used_at_home(
    problem: Problem, residents: Collection[int], hop: Hop, held_bytes: int, *, strategy: str
) -> Placement | None:
    """Return a placement with ``held_bytes`` at home in between, of the streamed weights those of most uses first.

    ``None`` where the others do not fit at the hop's home, or all have as many uses.
    """
    streamed = [i for i in range(len(problem.weights)) if i not in residents]
    if len({len(problem.weights[i].uses) for i in streamed}) <= 1:
        return None
    link_of: list[int | None] = [None] * len(problem.weights)
    left = held_bytes
    for i in sorted(streamed, key=lambda i: -len(problem.weights[i].uses)):
        stays = problem.weights[i].size_bytes <= left
        link_of[i] = hop.push if stays else hop.home
        left -= problem.weights[i].size_bytes if stays else 0
    return _with_room(problem, link_of, hop, strategy)


def _with_room(
    problem: Problem, link_of: Sequence[int | None], hop: Hop, strategy: str
) -> Placement | None:
    """Return the placement where its weights fit at the hop's home."""
    sizes = (weight.size_bytes for weight in problem.weights)
    away = sum(size for size, link in zip(sizes, link_of, strict=True) if link == hop.home)
    if away > problem.room_bytes[problem.links[hop.home].source_tier]:
        return None
    return Placement(strategy=strategy, link_of=tuple(link_of))
