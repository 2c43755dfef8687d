"""Two hops: the fastest schedule in which what comes from a drive waits in the memory in between.

Read ahead of what the computing memory has room for, and read once for several uses: both take room in between that
could as well hold weights for good. So sets of residents, sizes of the arena in between and of the staging region are
tried together, and the rest of the memory in between is filled with homes, spread evenly or of what has most uses.
None of these depends on the budget of the tier that computes, which only decides what fits; what a bound rules out is
not tried.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

from gascompile.passes.bounds.certify import physical_limit, problem_limit
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.model.problem import Placement, Problem, StagedCopy
from gascompile.passes.model.ways import ways_of
from gascompile.passes.search.hop_schedule import (
    Hop,
    HopCopies,
    homes_of,
    hop_bound_s,
    hop_copies,
    hop_schedule,
    hops,
    most_used_at_home,
)
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import Allowance, resident_bytes, snap, staging_sizes_of
from gascompile.passes.search.strategies import (
    MANY_WEIGHTS,
    REACHES,
    near_intervals,
    strategies,
)

_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Streamed weights that follow each other, for which the arena in between has room. Chosen, not measured."""
_REACHES = (0, 8, 1 << 30)
"""Streamed copies, within which a weight waits half the way for its next use; the last one is all of an iteration."""
_FEW = 2
"""Staging regions that are tried first among many weights: the largest. Chosen, not measured."""
_PATIENCE = 24
"""Sets of residents that are tried in vain before the search among many weights ends; as in ``search``."""
_MOST_WORK = 150_000
"""Copies that are placed in one search; [empirical] about a second and a half on one core of an EPYC."""
_ROUNDING = 1e-9  # share by which sums of seconds in another order differ


def two_hops(
    problem: Problem, best: Schedule | None, *, mip_gap: float, time_limit_s: float = math.inf
) -> Schedule | None:
    """Return the faster of ``best`` and the schedules in two hops within the budget.

    Args:
        problem: what is planned.
        best: the best schedule without.
        mip_gap: nothing is tried where no such schedule gains as large a share.
        time_limit_s: seconds after which a schedule is not improved further.
    """
    effort = Allowance(time_limit_s, _MOST_WORK)
    for hop in hops(problem):
        if not _may_gain(problem, hop, best, mip_gap, time_limit_s):
            continue
        is_large = best is not None and len(problem.weights) >= MANY_WEIGHTS
        if is_large and best is not None:
            # Of many weights a look around the best schedule tells whether more is worth the time.
            residents = frozenset(w for w, x in enumerate(best.placement.link_of) if x is None)
            strategy = best.placement.strategy
            found = _staged(problem, hop, residents, strategy, best, effort, few=True)
            if found is best:
                continue
            best = found
        vain = 0
        for bound_s, residents, strategy in _sets(problem):
            known_s = best.seconds if best is not None else math.inf
            if bound_s >= known_s * (1 - _ROUNDING) or (best is not None and effort.over):
                break
            if is_large and vain >= _PATIENCE:
                break
            better = _staged(problem, hop, residents, strategy, best, effort, few=is_large)
            vain = 0 if better is not best else vain + 1
            best = better
    return best


def _may_gain(
    problem: Problem, hop: Hop, best: Schedule | None, mip_gap: float, time_limit_s: float
) -> bool:
    """Return whether a schedule in two hops may be faster by a share of ``mip_gap``."""
    feed = problem.machine.links[hop.feed]
    choices = [
        ways
        for ways in ways_of(problem)
        if any(way.feed == feed and way.position == hop.push for way in ways)
    ]
    if not choices or best is None:
        return bool(choices)
    enough_s = best.seconds * (1 - mip_gap)
    if problem_limit(problem)[0] >= enough_s:
        return False
    bound_s = occupancy(
        problem,
        problem.arena_limit_bytes,
        enough_s=enough_s,
        time_limit_s=time_limit_s,
        choices=choices,
    )
    return bound_s < enough_s


def _sets(problem: Problem) -> list[tuple[float, frozenset[int], str]]:
    """Return sets of residents that fit, each with a time that no schedule with it beats, by that time."""
    found: list[tuple[float, float, int, int]] = []
    families = strategies(problem)
    total = sum(weight.size_bytes for weight in problem.weights)
    rooms = problem.room_bytes
    for number, family in enumerate(families):
        weights = [problem.weights[i] for i in family.order]
        taken = [0, *accumulate(weight.reserved_bytes for weight in weights)]
        kept = [0, *accumulate(weight.size_bytes for weight in weights)]
        for count in range(family.least, bisect_right(taken, problem.arena_limit_bytes)):
            moved_s, _ = physical_limit(0.0, total - kept[count], 0, problem.machine, rooms)
            bound_s = max(problem.compute_s, moved_s * (1 - _ROUNDING))
            found.append((bound_s, moved_s, number, count))
    seen: dict[frozenset[int], tuple[float, frozenset[int], str]] = {}
    for bound_s, _, number, count in sorted(found):
        member = families[number].member(count)
        seen.setdefault(member.residents, (bound_s, member.residents, member.strategy))
    return list(seen.values())


def _staged(
    problem: Problem,
    hop: Hop,
    residents: frozenset[int],
    strategy: str,
    best: Schedule | None,
    effort: Allowance,
    *,
    few: bool,
) -> Schedule | None:
    """Return the faster of ``best`` and the schedules with a set of residents.

    Args:
        effort: of the search; takes the copies that are placed.
        few: try few sizes.

    The others are those of ``two_hops``.
    """
    room_bytes = problem.room_bytes[hop.place]
    for middle_bytes in _middle_sizes(problem, residents)[:: 2 if few else 1]:
        if middle_bytes > room_bytes:
            break
        held_bytes = room_bytes - middle_bytes
        homes = [
            choose(problem, residents, hop, held_bytes, strategy=strategy)
            for choose in (homes_of, most_used_at_home)
        ]
        for placement, kept in product(dict.fromkeys(homes), _kept(problem, residents)):
            if placement is not None and hop.home in placement.link_of:
                staying = replace(placement, kept=kept)
                best = _placed(problem, hop, staying, middle_bytes, best, effort, few=few)
    return best


def staged_hops(
    problem: Problem, placement: Placement, place: str, middle_bytes: int, best: Schedule | None
) -> Schedule | None:
    """Return the faster of ``best`` and a placement's schedules in two hops over ``place``, with an arena of a size."""
    for hop in hops(problem):
        if hop.place == place and hop.home in placement.link_of:
            endless = Allowance(math.inf)
            best = _placed(problem, hop, placement, middle_bytes, best, endless, few=False)
    return best


def _placed(
    problem: Problem,
    hop: Hop,
    placement: Placement,
    middle_bytes: int,
    best: Schedule | None,
    effort: Allowance,
    *,
    few: bool,
) -> Schedule | None:
    """Return the faster of ``best`` and the schedules of a placement."""
    residents = [w for w, link in enumerate(placement.link_of) if link is None]
    kept_bytes = resident_bytes(problem, residents)
    for made in _copies(problem, placement, hop):
        bound_s = hop_bound_s(problem, made)
        for staging_bytes in _staging_sizes(problem, made, kept_bytes, few=few):
            if best is not None and (bound_s >= best.seconds * (1 - _ROUNDING) or effort.over):
                break
            effort.work += len(made.copies) + len(made.fetched)
            staged = hop_schedule(
                problem,
                placement,
                hop,
                made,
                resident_bytes=kept_bytes,
                staging_bytes=staging_bytes,
                middle_bytes=middle_bytes,
            )
            best = _faster(best, staged, bound_s)
    return best


def _faster(best: Schedule | None, staged: Schedule | None, bound_s: float) -> Schedule | None:
    if staged is None:
        return best
    staged = snap(staged, bound_s)
    is_faster = best is None or staged.seconds < best.seconds * (1 - _ROUNDING)
    return staged if is_faster else best


def _staging_sizes(
    problem: Problem, made: HopCopies, resident_bytes: int, *, few: bool
) -> list[int]:
    """Return sizes of the staging region that fit, the largest first."""
    most_bytes = problem.arena_limit_bytes - resident_bytes
    sizes = [size for size in staging_sizes_of(problem, made.copies) if size <= most_bytes][::-1]
    return [*sizes[:_FEW], *sizes[-1:]] if few and len(sizes) > _FEW else sizes


def _middle_sizes(problem: Problem, residents: frozenset[int]) -> list[int]:
    """Return sizes of the arena in between worth trying, ascending."""
    rooms = [w.reserved_bytes for i, w in enumerate(problem.weights) if i not in residents]
    count = len(rooms)
    sums = [0, *accumulate([*rooms, *(rooms if problem.repeats else [0] * count)])]
    sizes: set[int] = set()
    for window in _WINDOWS:
        reach = min(window, count)
        sizes.add(max((sums[k + reach] - sums[k] for k in range(count)), default=0))
    return sorted(sizes - {0})


def _kept(problem: Problem, residents: frozenset[int]) -> Iterator[frozenset[tuple[int, int]]]:
    """Yield intervals that streamed weights stay for where ops compute, as ``placements_of`` does."""
    streamed = [i for i in range(len(problem.weights)) if i not in residents]
    yield from dict.fromkeys(near_intervals(problem, streamed, reach) for reach in REACHES)


def _copies(problem: Problem, placement: Placement, hop: Hop) -> Iterator[HopCopies]:
    """Yield the copies with each reach that makes a difference."""
    seen: set[tuple[StagedCopy, ...]] = set()
    for reach in _REACHES:
        made = hop_copies(problem, placement, hop, reach)
        if made.fetched not in seen:
            seen.add(made.fetched)
            yield made
