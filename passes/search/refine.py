"""Refine: what the integer program adds to the strategies.

The program is solved for arenas on a ladder that does not depend on the budget. Each solution opens a
family of placements, a few weights fewer and many more, for arenas up to the next rung. A rung is
skipped only when the bound of the next one says that it cannot help. So the result is the fastest of
all rungs below the budget, and a larger budget has all of them and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gascompile.passes.bounds.certify import problem_limit
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.bounds.shadow_prices import Solution
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.model.ways import direct_ways
from gascompile.passes.search.place import place
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import resident_bytes, search
from gascompile.passes.search.strategies import MANY_WEIGHTS, Family, ResidentSet

_NUM_RUNGS = 16  # arenas from the least to one of all weights
_BUFFERS = 2  # ops ahead whose loads have room, where that fits; else none
_CANDIDATE_GAP = 0.03  # solutions are candidates only: placements around them are searched
_NUM_FEWER = 8  # residents that a placement is tried without
_LARGE_GAP = 0.01
"""A schedule of a large model that is so close to a bound is not improved with the solver."""


def refine(
    problem: Problem, least_arena_bytes: int, best: Schedule | None, effort: Effort
) -> tuple[Schedule | None, float]:
    """Return the faster of ``best`` and the solver's schedules, and the relaxation's bound where it was solved whole.

    Args:
        least_arena_bytes: the smallest arena of any plan; the ladder starts here.
        best: a schedule to beat; without it the result is the solver's own.
        effort: what all solves together may take.
    """
    if not problem.links:
        return best, 0.0
    if len(problem.weights) >= MANY_WEIGHTS:
        return _refine_large(problem, best, effort)
    arena_bytes = problem.arena_limit_bytes
    for below, above in reversed(list(pairwise(_ladder(problem, least_arena_bytes)))):
        if below > arena_bytes:
            continue
        if effort.left_s() <= 0 or (
            best is not None
            and (effort.pivots.left <= 0 or _cannot_win(problem, above, best, effort))
        ):
            break
        candidates = _rung(problem, below, effort)
        best = search(
            problem,
            candidates,
            min(above, arena_bytes),
            best,
            time_limit_s=effort.left_s(),
        )
    return best, 0.0


def _refine_large(
    problem: Problem, best: Schedule | None, effort: Effort
) -> tuple[Schedule | None, float]:
    """Return the faster of ``best`` and what the relaxation's order of residents gives, and its bound.

    It is solved only where ``best`` is far from what a much quicker program proves.
    """
    arena_bytes = problem.arena_limit_bytes

    def left_s() -> float:
        return max(0.0, effort.left_s())

    if best is not None:
        enough_s = best.seconds * (1 - _LARGE_GAP)
        limit_s = max(
            problem_limit(problem, arena_bytes, has_hops=False)[0],
            occupancy(
                problem,
                arena_bytes,
                enough_s=enough_s,
                time_limit_s=left_s(),
                choices=[direct_ways(problem)],
            ),
        )
        if limit_s >= enough_s or left_s() == 0:
            return best, 0.0
    relaxation = place(
        problem,
        arena_bytes,
        time_limit_s=left_s(),
        mip_gap=_CANDIDATE_GAP,
        relaxed=True,
        pivots=effort.pivots,
    )
    known_s = 0.0 if relaxation.timed_out else relaxation.bound_s
    if best is not None and not relaxation.order:
        return best, known_s
    family = Family("ilp", relaxation.order)
    return search(problem, [family], arena_bytes, best, time_limit_s=left_s()), known_s


def _ladder(problem: Problem, least_arena_bytes: int) -> list[int]:
    """Return arena sizes from the least one to the one that holds every weight."""
    span = max(0, resident_bytes(problem, range(len(problem.weights))) - least_arena_bytes)
    rungs = {least_arena_bytes + span * step // _NUM_RUNGS for step in range(_NUM_RUNGS + 1)}
    top = least_arena_bytes + span
    # Beyond the top there is nothing to gain, but budgets above it belong to the last rung too.
    return [*sorted(rungs), top + 1]


def _cannot_win(problem: Problem, arena_bytes: int, best: Schedule, effort: Effort) -> bool:
    """Whether no schedule within the arena beats ``best``; the solver is asked last."""
    if best.seconds <= problem_limit(problem, arena_bytes, has_hops=False)[0]:
        return True
    relaxation = place(
        problem,
        arena_bytes,
        time_limit_s=effort.left_s(),
        mip_gap=_CANDIDATE_GAP,
        relaxed=True,
        pivots=effort.pivots,
    )
    return best.seconds <= relaxation.bound_s


def _rung(problem: Problem, arena_bytes: int, effort: Effort) -> Iterator[ResidentSet | Placement]:
    """Yield placements around the solution for one arena.

    What a search found that the clock ended is not used, as it differs from run to run.
    """
    for buffers in (_BUFFERS, 0):
        relaxation, integral = (
            place(
                problem,
                arena_bytes,
                time_limit_s=effort.left_s(),
                mip_gap=_CANDIDATE_GAP,
                buffers=buffers,
                relaxed=relaxed,
                pivots=effort.pivots,
            )
            for relaxed in (True, False)
        )
        if relaxation.placement is None:
            continue
        for count in range(len(relaxation.order) + 1):
            yield ResidentSet("ilp", frozenset(relaxation.order[:count]))
        if integral.placement is not None and not integral.timed_out:
            yield from _around(problem, integral, relaxation.order)
        return


def _around(
    problem: Problem, solution: Solution, order: tuple[int, ...]
) -> Iterator[ResidentSet | Placement]:
    """Yield the solution, the same with some residents fewer, and with ever more of them."""
    placement = solution.placement
    if placement is None:
        return
    yield placement
    residents = [w for w in order if placement.link_of[w] is None]
    for count in range(max(0, len(residents) - _NUM_FEWER), len(residents)):
        yield ResidentSet("ilp", frozenset(residents[:count]))
    for w in order:
        if placement.link_of[w] is not None:
            link_of = (*placement.link_of[:w], None, *placement.link_of[w + 1 :])
            kept = frozenset(pair for pair in placement.kept if pair[0] != w)
            placement = Placement(strategy="ilp", link_of=link_of, kept=kept)
            yield placement
