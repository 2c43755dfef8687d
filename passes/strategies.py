"""Strategies: the orders in which the known planners fill the compute tier, as families of placements.

Each family is a list of placements that does not depend on the budget; a budget only decides which of
them fit. The best of those that fit can therefore never get slower with more memory.

* ``all_streamed``: nothing stays (ZeRO-Inference).
* ``first_fit``: weights stay in execution order until memory is full (accelerate's device map).
* ``largest_area``: what stays longest unused for its bytes leaves first (G10).
* ``per_layer``: the same fraction of every stretch of the model stays (FlexGen).
* ``largest_first``: some of the largest weights stay, then the smallest ones.
* ``exhaustive``: every set of weights, where there are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from gascompile.passes.problem import Placement, Problem

NAMES = ("all_streamed", "first_fit", "largest_area", "per_layer", "largest_first", "exhaustive")
_FRACTIONS = 64
_NUM_LARGEST = 12
_FEW = 8
_REACHES = (1, 4)


@dataclass(frozen=True, slots=True)
class ResidentSet:
    """Weights that stay, and who proposed them."""

    strategy: str
    residents: frozenset[int]


def strategies(problem: Problem) -> list[ResidentSet]:
    """Return the resident sets of every family, without repetitions, in a fixed order."""
    found: dict[frozenset[int], ResidentSet] = {}
    for name in NAMES:
        for residents in _FAMILIES[name](problem):
            found.setdefault(residents, ResidentSet(name, residents))
    return list(found.values())


def family(problem: Problem, name: str) -> list[ResidentSet]:
    """Return the resident sets of one strategy, from none resident to all."""
    return [ResidentSet(name, residents) for residents in dict.fromkeys(_FAMILIES[name](problem))]


def homes(problem: Problem, residents: frozenset[int], strategy: str) -> list[Placement]:
    """Return placements of a resident set; none where the slow tiers cannot hold the others.

    They differ in the links, the fastest alone or balanced over all, and in how long a streamed weight
    stays for its next use: until another weight is needed, or for a few of them.
    """
    streamed = [i for i in range(len(problem.weights)) if i not in residents]
    found: dict[Placement, None] = {}
    for balanced in (False, True) if len(problem.links) > 1 else (False,):
        link_of = _choose_links(problem, streamed, balanced)
        if link_of is None:
            continue
        for reach in _REACHES:
            kept = _near_intervals(problem, streamed, reach)
            found[Placement(strategy=strategy, link_of=link_of, kept=kept)] = None
    return list(found)


def _all_streamed(problem: Problem) -> Iterator[frozenset[int]]:
    yield frozenset()


def _prefixes(order: Sequence[int]) -> Iterator[frozenset[int]]:
    for count in range(len(order) + 1):
        yield frozenset(order[:count])


def _first_fit(problem: Problem) -> Iterator[frozenset[int]]:
    return _prefixes(range(len(problem.weights)))


def _largest_area(problem: Problem) -> Iterator[frozenset[int]]:
    num_ops = len(problem.op_times_s)

    def area(i: int) -> tuple[float, int]:
        weight = problem.weights[i]
        later = (*weight.uses[1:], *(use + num_ops for use in weight.uses[:1]))
        longest = max(b - a for a, b in zip(weight.uses, later, strict=True)) if later else 0
        return weight.reserved_bytes * longest, _spread_rank(i, len(problem.weights))

    return _prefixes(sorted(range(len(problem.weights)), key=area))


def _per_layer(problem: Problem) -> Iterator[frozenset[int]]:
    """Keep a fraction of the bytes of every stretch: weights stay where the running quota passes them."""
    for part in range(_FRACTIONS + 1):
        chosen: list[int] = []
        quota = 0.0
        for i, weight in enumerate(problem.weights):
            quota += weight.reserved_bytes * part / _FRACTIONS
            if quota >= weight.reserved_bytes * (1 - 1e-9):
                chosen.append(i)
                quota -= weight.reserved_bytes
        yield frozenset(chosen)


def _largest_first(problem: Problem) -> Iterator[frozenset[int]]:
    count = len(problem.weights)
    order = sorted(
        range(count),
        key=lambda i: (problem.weights[i].reserved_bytes, _spread_rank(i, count)),
    )
    grid = {step * count // _NUM_LARGEST for step in range(_NUM_LARGEST + 1)}
    for num_largest in sorted({*range(min(count, 4) + 1), *grid}):
        largest, rest = order[count - num_largest :], order[: count - num_largest]
        for num_smallest in range(len(rest) + 1):
            yield frozenset((*largest, *rest[:num_smallest]))


def _exhaustive(problem: Problem) -> Iterator[frozenset[int]]:
    """Keep every set in turn; only the empty one where there are too many."""
    weights = range(len(problem.weights))
    for count in range(len(weights) + 1 if len(weights) <= _FEW else 1):
        yield from map(frozenset, combinations(weights, count))


_FAMILIES = {
    "all_streamed": _all_streamed,
    "first_fit": _first_fit,
    "largest_area": _largest_area,
    "per_layer": _per_layer,
    "largest_first": _largest_first,
    "exhaustive": _exhaustive,
}


def _spread_rank(i: int, count: int) -> int:
    """Return a rank that puts neighbours far apart: the bits of ``i`` reversed."""
    bits = max(1, (count - 1).bit_length())
    return int(format(i, f"0{bits}b")[::-1], 2)


def _near_intervals(
    problem: Problem, streamed: Sequence[int], reach: int
) -> frozenset[tuple[int, int]]:
    """Return intervals of streamed weights with fewer than ``reach`` ops in them that read such weights."""
    repeated = [i for i in streamed if len(problem.weights[i].uses) > 1]
    if not repeated:
        return frozenset()
    readers = sorted({op for i in streamed for op in problem.weights[i].uses})
    rank = {op: k for k, op in enumerate(readers)}
    return frozenset(
        (i, j)
        for i in repeated
        for j, (use, following) in enumerate(pairwise(problem.weights[i].uses))
        if rank[following] - rank[use] <= reach
    )


def _choose_links(
    problem: Problem, streamed: Sequence[int], balanced: bool
) -> tuple[int | None, ...] | None:
    """Return a link per weight, in the order of use; ``None`` when the slow tiers are too small."""
    left = dict(problem.room_bytes)
    busy_s = [0.0] * len(problem.links)
    link_of: list[int | None] = [None] * len(problem.weights)
    for i in streamed:
        weight = problem.weights[i]
        fitting = [
            k for k, link in enumerate(problem.links) if left[link.source_tier] >= weight.size_bytes
        ]
        if not fitting:
            return None
        chosen = fitting[0]
        if balanced:
            chosen = min(fitting, key=lambda k: (busy_s[k] + problem.transfer_s(i, k), k))
        busy_s[chosen] += problem.transfer_s(i, chosen)
        left[problem.links[chosen].source_tier] -= weight.size_bytes
        link_of[i] = chosen
    return tuple(link_of)
