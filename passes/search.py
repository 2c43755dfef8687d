"""Search: the fastest schedule among placements and sizes of the staging region.

What may be tried does not depend on the budget, only what fits does, and nothing that could be the
fastest is skipped: a bound on its time rules a candidate out, never the clock. So the result never
gets slower with a larger budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from gascompile.passes.problem import Placement, Problem, Visit, visits_of
from gascompile.passes.schedule import Schedule, schedule
from gascompile.passes.strategies import ResidentSet, homes

_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROUNDING = 1e-9


def search(
    problem: Problem,
    candidates: Iterable[ResidentSet | Placement],
    arena_bytes: int,
    best: Schedule | None = None,
) -> Schedule | None:
    """Return the fastest schedule of ``candidates`` whose arena is at most ``arena_bytes``.

    Args:
        best: a schedule to beat; returned when nothing is faster.
    """
    fitting = [
        (_set_bound_s(problem, _residents(candidate)), number, candidate)
        for number, candidate in enumerate(candidates)
        if resident_bytes(problem, _residents(candidate)) <= arena_bytes
    ]
    for bound_s, _, candidate in sorted(fitting, key=lambda item: item[:2]):
        if best is not None and bound_s[0] >= best.seconds:
            break
        for placement in _placements(problem, candidate):
            best = best_staging(problem, placement, arena_bytes, best)
    return best


def best_staging(
    problem: Problem, placement: Placement, arena_bytes: int, best: Schedule | None = None
) -> Schedule | None:
    """Return the faster of ``best`` and the placement's schedules within ``arena_bytes``."""
    bound_s = time_bound_s(problem, placement)
    residents = resident_bytes(problem, _residents(placement))
    for staging_bytes in reversed(staging_sizes(problem, placement)):
        if residents + staging_bytes > arena_bytes:
            continue
        if best is not None and bound_s >= best.seconds:
            break
        found = schedule(problem, placement, staging_bytes, resident_bytes=residents)
        if found is not None:
            found = snap(found, time_bound_s(problem, found.placement))
            if best is None or found.seconds < best.seconds:
                best = found
    return best


def snap(found: Schedule, bound_s: float) -> Schedule:
    """Return the schedule with its time rounded to the bound where they differ by rounding only."""
    if found.seconds > bound_s * (1 + _ROUNDING):
        return found
    return found.with_seconds(bound_s)


def resident_bytes(problem: Problem, residents: Iterable[int]) -> int:
    """Return what resident weights take in the arena."""
    return sum(problem.weights[i].reserved_bytes for i in residents)


def staging_sizes(problem: Problem, placement: Placement) -> list[int]:
    """Return sizes of the staging region worth trying, ascending.

    Size ``m`` holds what any op has in use and the visits of the ``m - 1`` ops after it; the
    first one is the least that the placement can run with.
    """
    visits = visits_of(problem, placement)
    if not visits:
        return [0]
    starts = sorted({visit.start for visit in visits})
    loads = dict.fromkeys(starts, 0)
    for visit in visits:
        loads[visit.start] += visit.reserved_bytes
    used = _used_bytes(visits, starts)
    count = len(starts)
    following = [*loads.values(), *(loads.values() if problem.repeats else [0] * count)]
    sums = [0, *accumulate(following)]
    sizes: set[int] = set()
    for window in _WINDOWS:
        reach = min(window, count)
        sizes.add(max(used[k] + sums[k + reach] - sums[k + 1] for k in range(count)))
        if window >= count:
            break
    ascending = sorted(sizes)
    between = [(a + b) // 2 for a, b in pairwise(ascending[:4])]
    return sorted({*ascending, *(size // 4096 * 4096 for size in between)})


def least_arena_bytes(problem: Problem, placement: Placement) -> tuple[int, int]:
    """Return the smallest arena that ``placement`` runs in, and the op that sets it."""
    plain = Placement(strategy=placement.strategy, link_of=placement.link_of)
    visits = visits_of(problem, plain)
    residents = resident_bytes(problem, _residents(placement))
    needed: dict[int, int] = {}
    for visit in visits:
        needed[visit.start] = needed.get(visit.start, 0) + visit.reserved_bytes
    op = max(needed, key=lambda op: needed[op], default=0)
    return residents + needed.get(op, 0), op


def time_bound_s(problem: Problem, placement: Placement) -> float:
    """Return a time that no schedule of ``placement`` beats: its ops, or one link's transfers."""
    busy_s = [0.0] * len(problem.links)
    for visit in visits_of(problem, placement):
        busy_s[visit.link] += problem.transfer_s(visit.weight, visit.link)
    return max(problem.compute_s, *busy_s, 0.0)


def _set_bound_s(problem: Problem, residents: Iterable[int]) -> tuple[float, float]:
    """Return a bound on the time of all placements of a resident set, and a tie-break."""
    resident = set(residents)
    streamed = [i for i in range(len(problem.weights)) if i not in resident]
    if len(problem.links) == 1:
        link_s = sum(problem.transfer_s(i, 0) for i in streamed)
    else:
        rate = sum(link.bandwidth_bytes_per_s for link in problem.links)
        total = sum(problem.weights[i].size_bytes for i in streamed)
        link_s = total / rate if rate else 0.0
    return max(problem.compute_s, link_s * (1 - _ROUNDING)), link_s


def _residents(candidate: ResidentSet | Placement) -> Sequence[int]:
    if isinstance(candidate, ResidentSet):
        return tuple(candidate.residents)
    return tuple(i for i, link in enumerate(candidate.link_of) if link is None)


def _placements(problem: Problem, candidate: ResidentSet | Placement) -> list[Placement]:
    if isinstance(candidate, Placement):
        return [candidate]
    return homes(problem, candidate.residents, candidate.strategy)


def _used_bytes(visits: Sequence[Visit], starts: Sequence[int]) -> list[int]:
    """Return the bytes of the visits in use at each op at which one begins."""
    used = dict.fromkeys(starts, 0)
    for visit in visits:
        used[visit.start] += visit.reserved_bytes
        if visit.end > visit.start:
            for op in starts[bisect_right(starts, visit.start) :]:
                if op > visit.end:
                    break
                used[op] += visit.reserved_bytes
    return list(used.values())
