"""Search: the fastest schedule among placements and sizes of the staging region.

What may be tried does not depend on the budget, only what fits does, and nothing that could be the
fastest is skipped: a bound on its time rules a candidate out. So the result never gets slower with a
larger budget. Any search ends with its work, which is counted, so that a busy machine finds the same.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product

import numpy as np

from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.model.problem import (
    Placement,
    Problem,
    StagedCopy,
    copies_s,
    staged_copies,
)
from gascompile.passes.search.schedule import Schedule, schedule
from gascompile.passes.search.strategies import MANY_WEIGHTS, Family, ResidentSet, placements_of

_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LANE_SIZES = 4
"""Sizes to try of each link's own part of the staging region."""
_ROUNDING = 1e-9  # share by which sums of seconds in another order differ
_MOST_WORK = 100_000
"""Staged copies that are placed in one search; [empirical] about a second on one core of an EPYC. Most models
take 3,000, a Llama of 1.1B up to 55,000; one of 8B in 1,024 tiles, in a budget in which computing and moving take
about the same, would take 380,000."""

Candidate = Family | ResidentSet | Placement
_Single = tuple[Family, int] | ResidentSet | Placement


class Allowance:
    """What a search may still do: so much work, and no longer than the clock allows."""

    def __init__(self, time_limit_s: float, most_work: int = _MOST_WORK) -> None:
        self._deadline_s = time.perf_counter() + time_limit_s
        self._most_work = most_work
        self.work = 0

    @property
    def over(self) -> bool:
        """Whether a schedule, once there is one, is not improved further."""
        return self.work >= self._most_work or time.perf_counter() > self._deadline_s


def search(
    problem: Problem,
    candidates: Iterable[Candidate],
    arena_bytes: int,
    best: Schedule | None = None,
    *,
    time_limit_s: float = math.inf,
    most_work: int = _MOST_WORK,
) -> Schedule | None:
    """Return the fastest schedule of ``candidates`` whose arena is at most ``arena_bytes``.

    Args:
        best: a schedule to beat; returned when nothing is faster.
        time_limit_s: seconds after which a schedule, once there is one, is not improved further.
        most_work: staged copies that are placed, after which it is the same.
    """
    effort = Allowance(time_limit_s, most_work)
    fitting = [
        _numbered(number, _fitting(problem, item, arena_bytes))
        for number, item in enumerate(candidates)
    ]
    seen: set[frozenset[int]] = set()
    # Of each candidate only the members up to the last one that is looked at are ever made.
    for bound_s, _, _, single in heapq.merge(*fitting, key=lambda item: item[:3]):
        if best is not None and (bound_s >= best.seconds or effort.over):
            break
        candidate = single[0].member(single[1]) if isinstance(single, tuple) else single
        if isinstance(candidate, ResidentSet):
            if candidate.residents in seen:
                continue
            seen.add(candidate.residents)
        for placement in _placements(problem, candidate):
            best = best_staging(problem, placement, arena_bytes, best, effort)
    return best


def best_staging(
    problem: Problem,
    placement: Placement,
    arena_bytes: int,
    best: Schedule | None = None,
    effort: Allowance | None = None,
) -> Schedule | None:
    """Return the faster of ``best`` and the placement's schedules within ``arena_bytes``.

    Args:
        effort: of the search that this is part of; takes the work.
    """
    effort = effort or Allowance(math.inf)
    residents = resident_bytes(problem, _residents(placement))
    copies = staged_copies(problem, placement)
    bound_s = _busy_s(problem, copies)
    if best is not None and bound_s >= best.seconds:
        return best
    tried: list[tuple[int, ...]] = []
    for lanes in _regions(problem, copies):
        staging_bytes = sum(lanes)
        if residents + staging_bytes > arena_bytes:
            continue
        if len(problem.weights) >= MANY_WEIGHTS and any(_within(lanes, other) for other in tried):
            continue
        tried.append(lanes)
        if best is not None and (
            max(bound_s, _stalled_s(problem, copies, lanes)) >= best.seconds or effort.over
        ):
            continue
        effort.work += len(copies)
        staged = schedule(
            problem,
            placement,
            staging_bytes,
            resident_bytes=residents,
            lanes=lanes,
            copies=copies,
        )
        if staged is not None:
            as_asked = staged.placement is placement
            busy_s = bound_s if as_asked else time_bound_s(problem, staged.placement)
            staged = snap(staged, busy_s)
            if best is None or staged.seconds < best.seconds:
                best = staged
    return best


def _regions(problem: Problem, copies: Sequence[StagedCopy]) -> Iterator[tuple[int, ...]]:
    """Yield staging regions: whole ones, the largest first, and ones with a lane for each link."""
    several = len({copy.link for copy in copies}) > 1
    if not several or len(problem.weights) < MANY_WEIGHTS:
        yield from ((size,) for size in reversed(staging_sizes_of(problem, copies)))
    if several:
        sizes = [
            staging_sizes_of(problem, [copy for copy in copies if copy.link == link])[:_LANE_SIZES]
            for link in range(len(problem.links))
        ]
        yield from sorted(product(*sizes), key=sum, reverse=True)


def _within(lanes: Sequence[int], other: Sequence[int]) -> bool:
    """Whether each lane is at most as large as the other's: then it is hardly ever faster."""
    return len(lanes) == len(other) and all(a <= b for a, b in zip(lanes, other, strict=True))


def _stalled_s(problem: Problem, copies: Sequence[StagedCopy], lanes: Sequence[int]) -> float:
    """Return a time that no schedule in these lanes beats.

    Where a lane has no room for a second copy beside one, its link rests while the ops of that copy run.
    """
    if len(lanes) == 1:
        return 0.0
    longest_s = 0.0
    for link, lane_bytes in enumerate(lanes):
        inside = [copy for copy in copies if copy.link == link]
        smallest = min((copy.reserved_bytes for copy in inside), default=0)
        busy_s = sum(problem.transfer_s(copy.weight, link) for copy in inside)
        # The last copy's ops may run beside the first load of the next iteration, or after all loads.
        rests = [
            problem.sums_s[copy.end + 1] - problem.sums_s[copy.start]
            for copy in inside
            if copy.reserved_bytes + smallest > lane_bytes
        ]
        longest_s = max(longest_s, busy_s + sum(rests))
    return longest_s * (1 - _ROUNDING)


def snap(staged: Schedule, bound_s: float) -> Schedule:
    """Return the schedule with its time rounded to the bound where they differ by rounding only."""
    if staged.seconds > bound_s * (1 + _ROUNDING):
        return staged
    return staged.with_seconds(bound_s)


def resident_bytes(problem: Problem, residents: Iterable[int]) -> int:
    """Return what resident weights take in the arena."""
    return sum(problem.weights[i].reserved_bytes for i in residents)


def staging_sizes(problem: Problem, placement: Placement) -> list[int]:
    """Return sizes of the staging region worth trying, ascending.

    Size ``m`` holds what any op has in use and the copies of the ``m - 1`` ops after it; the
    first one is the least that the placement can run with.
    """
    return staging_sizes_of(problem, staged_copies(problem, placement))


def staging_sizes_of(problem: Problem, copies: Sequence[StagedCopy]) -> list[int]:
    """Return what ``staging_sizes`` does, of copies in the order of their first use."""
    if not copies:
        return [0]
    starts = sorted({copy.start for copy in copies})
    loads = dict.fromkeys(starts, 0)
    for copy in copies:
        loads[copy.start] += copy.reserved_bytes
    used = np.array(_used_bytes(copies, starts), np.int64)
    count = len(starts)
    following = [*loads.values(), *(loads.values() if problem.repeats else [0] * count)]
    sums = np.array([0, *accumulate(following)], np.int64)
    others = used - sums[1 : count + 1]
    sizes: set[int] = set()
    for window in _WINDOWS:
        reach = min(window, count)
        sizes.add(int((others + sums[reach : reach + count]).max()))
        if window >= count:
            break
    ascending = sorted(sizes)
    between = [(a + b) // 2 for a, b in pairwise(ascending[:4])]
    return sorted({*ascending, *(size // 4096 * 4096 for size in between)})


def least_arena_bytes(problem: Problem, placement: Placement) -> tuple[int, int]:
    """Return the smallest arena that ``placement`` runs in, and the op that sets it."""
    plain = Placement(strategy=placement.strategy, link_of=placement.link_of)
    copies = staged_copies(problem, plain)
    residents = resident_bytes(problem, _residents(placement))
    needed: dict[int, int] = {}
    for copy in copies:
        needed[copy.start] = needed.get(copy.start, 0) + copy.reserved_bytes
    op = max(needed, key=lambda op: needed[op], default=0)
    return residents + needed.get(op, 0), op


def time_bound_s(problem: Problem, placement: Placement) -> float:
    """Return a time that no schedule of ``placement`` beats: its ops, or one link's transfers."""
    return _busy_s(problem, staged_copies(problem, placement))


def _busy_s(problem: Problem, copies: Sequence[StagedCopy]) -> float:
    busy_s = [0.0] * len(problem.links)
    for copy, transfer_s in zip(copies, copies_s(problem, copies), strict=True):
        busy_s[copy.link] += transfer_s
    return max(problem.compute_s, *busy_s, 0.0)


def _fitting(
    problem: Problem, candidate: Candidate, arena_bytes: int
) -> Iterator[tuple[tuple[float, float], _Single]]:
    """Yield what of a candidate may fit, with a bound on its time and a tie-break, ascending."""
    if not isinstance(candidate, Family):
        order = tuple(_residents(candidate))
        member = Family("", order, len(order))
        yield from ((bound_s, candidate) for bound_s, _ in _fitting(problem, member, arena_bytes))
        return
    weights = [problem.weights[i] for i in candidate.order]
    taken = [0, *accumulate(weight.reserved_bytes for weight in weights)]
    # The more stay, the less time the links need.
    counts = range(candidate.least, bisect_right(taken, arena_bytes))[::-1]
    link_s: Iterator[float]
    if len(problem.links) == 1:
        every_s = [problem.transfer_s(i, 0) for i in range(len(problem.weights))]
        kept_s = np.cumsum([0.0, *(every_s[i] for i in candidate.order)])
        whole_s = sum(every_s)
        link_s = (whole_s - float(kept_s[count]) for count in counts)
    else:
        total = sum(weight.size_bytes for weight in problem.weights)
        kept = [0, *accumulate(weight.size_bytes for weight in weights)]
        link_s = (
            physical_limit(
                0.0, total - kept[count], 0, problem.machine, problem.room_bytes, has_hops=False
            )[0]
            for count in counts
        )
    for count, time_s in zip(counts, link_s, strict=True):
        bound_s = max(problem.compute_s, time_s * (1 - _ROUNDING))
        yield (bound_s, time_s), (candidate, count)


def _numbered(
    number: int, fitting: Iterator[tuple[tuple[float, float], _Single]]
) -> Iterator[tuple[float, float, int, _Single]]:
    return ((*bound, number, single) for bound, single in fitting)


def _residents(candidate: ResidentSet | Placement) -> Sequence[int]:
    if isinstance(candidate, ResidentSet):
        return tuple(candidate.residents)
    return tuple(i for i, link in enumerate(candidate.link_of) if link is None)


def _placements(problem: Problem, candidate: ResidentSet | Placement) -> list[Placement]:
    if isinstance(candidate, Placement):
        return [candidate]
    return placements_of(problem, candidate.residents, candidate.strategy)


def _used_bytes(copies: Sequence[StagedCopy], starts: Sequence[int]) -> list[int]:
    """Return the bytes of the copies in use at each op at which one begins."""
    used = dict.fromkeys(starts, 0)
    for copy in copies:
        used[copy.start] += copy.reserved_bytes
        if copy.end > copy.start:
            for op in starts[bisect_right(starts, copy.start) :]:
                if op > copy.end:
                    break
                used[op] += copy.reserved_bytes
    return list(used.values())
