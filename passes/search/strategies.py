"""Strategies: the orders in which the known planners fill the compute tier, as families of placements.

Each strategy is some orders of the weights that do not depend on the budget, and each order a family of
placements, in which ever more weights stay; a budget only decides which of them fit. The best of those
that fit can therefore never get slower with more memory.

* ``all_streamed``: nothing stays (ZeRO-Inference).
* ``first_fit``: weights stay in execution order until memory is full (accelerate's device map).
* ``largest_area``: what stays longest unused for its bytes leaves first (G10).
* ``per_layer``: the same fraction of every stretch of the model stays (FlexGen).
* ``largest_first``: some of the largest weights stay, then the smallest ones.
* ``exhaustive``: every set of weights, where there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from gascompile.passes.model.peer_orders import first_fit, largest_area
from gascompile.passes.model.problem import Placement, Problem, Weight
from gascompile.passes.search.spread import spread

NAMES = ("all_streamed", "first_fit", "largest_area", "per_layer", "largest_first", "exhaustive")
MANY_WEIGHTS = 160
"""From here on only the kinds of schedules are tried that pay for large models."""
_FRACTIONS = 64
"""Of all bytes that are tried as resident, stretch by stretch: a rung is 1.6 % of the weights. Chosen, not measured."""
_NUM_LARGEST = 12
"""Numbers of largest weights that stay first, beside zero to four of them. Chosen, not measured."""
_FEW = 8
"""Weights up to which every set is tried: 256 sets."""
REACHES = (1, 4)
"""Readers of streamed weights, within which one stays from a use to the next. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class ResidentSet:
    """Weights that stay, and who proposed them."""

    strategy: str
    residents: frozenset[int]


@dataclass(frozen=True, slots=True)
class Family:
    """Sets that follow from one order: its first weights stay, at least ``least`` of them."""

    strategy: str
    order: tuple[int, ...]
    least: int = 0

    def member(self, count: int) -> ResidentSet:
        """Return the set of the first ``count`` weights."""
        return ResidentSet(self.strategy, frozenset(self.order[:count]))

    def members(self) -> list[ResidentSet]:
        """Return all sets, the smallest first."""
        return [self.member(count) for count in range(self.least, len(self.order) + 1)]


def strategies(problem: Problem) -> list[Family]:
    """Return the families of every strategy in a fixed order."""
    return [
        Family(name, order, least) for name in NAMES for order, least in _FAMILIES[name](problem)
    ]


def family(problem: Problem, name: str) -> list[ResidentSet]:
    """Return the resident sets of one strategy without repetitions, from none resident to all."""
    members = [
        member
        for order, least in _FAMILIES[name](problem)
        for member in Family(name, order, least).members()
    ]
    return list(dict.fromkeys(members))


def placements_of(problem: Problem, residents: frozenset[int], strategy: str) -> list[Placement]:
    """Return placements of a resident set; none where the slow tiers cannot hold the others.

    They differ in the links, the fastest alone, for the first ones or for the last ones where it cannot
    have all, balanced in the order of use or spread evenly, and in how long a streamed weight stays for
    its next use: until another weight is needed, or for a few of them. Of many weights over several
    links only the even spread is worth a look.
    """
    streamed = [i for i in range(len(problem.weights)) if i not in residents]
    choices: list[Callable[[Problem, Sequence[int]], tuple[int | None, ...] | None]] = [_in_order]
    if len(problem.links) > 1:
        choices += [_balanced, spread]
    if len(problem.links) > 1 and len(problem.weights) < MANY_WEIGHTS:
        choices.append(_last_nearest)
    if len(problem.weights) >= MANY_WEIGHTS:
        choices.reverse()
    placements: dict[Placement, None] = {}
    for choose in choices:
        link_of = choose(problem, streamed)
        if link_of is None:
            continue
        for reach in REACHES:
            kept = near_intervals(problem, streamed, reach)
            placements[Placement(strategy=strategy, link_of=link_of, kept=kept)] = None
        if len(problem.weights) >= MANY_WEIGHTS:
            break
    return list(placements)


def evenly(sizes: Sequence[int], part: int, parts: int, *, least: float) -> Iterator[int]:
    """Yield members with ``part`` of ``parts`` of all bytes, each once so much of it as ``least`` is owed."""
    owed = 0.0
    for i, size in enumerate(sizes):
        owed += size * part / parts
        if owed >= size * least:
            yield i
            owed -= size


Order = tuple[tuple[int, ...], int]
"""Weights from those that stay first on, and how many of them stay at least."""


def _all_streamed(problem: Problem) -> Iterator[Order]:
    yield (), 0


def _first_fit(problem: Problem) -> Iterator[Order]:
    yield tuple(first_fit([min(weight.uses, default=-1) for weight in problem.weights])), 0


def _largest_area(problem: Problem) -> Iterator[Order]:
    num_ops = len(problem.op_times_s)

    def area(weight: Weight) -> int:
        later = (*weight.uses[1:], *(use + num_ops for use in weight.uses[:1]))
        longest = max(b - a for a, b in zip(weight.uses, later, strict=True)) if later else 0
        return weight.reserved_bytes * longest

    # Of equal ones neighbours are far apart.
    count = len(problem.weights)
    spread_out = sorted(range(count), key=lambda i: _spread_rank(i, count))
    order = largest_area([area(problem.weights[i]) for i in spread_out])
    yield tuple(spread_out[place] for place in order), 0


def _per_layer(problem: Problem) -> Iterator[Order]:
    """Keep a fraction of the bytes of every stretch: weights stay where the running quota passes them."""
    sizes = [weight.reserved_bytes for weight in problem.weights]
    for part in range(_FRACTIONS + 1):
        chosen = tuple(evenly(sizes, part, _FRACTIONS, least=1 - 1e-9))
        yield chosen, len(chosen)


def _largest_first(problem: Problem) -> Iterator[Order]:
    count = len(problem.weights)
    order = sorted(
        range(count),
        key=lambda i: (problem.weights[i].reserved_bytes, _spread_rank(i, count)),
    )
    grid = {step * count // _NUM_LARGEST for step in range(_NUM_LARGEST + 1)}
    for num_largest in sorted({*range(min(count, 4) + 1), *grid}):
        yield (*order[count - num_largest :], *order[: count - num_largest]), num_largest


def _exhaustive(problem: Problem) -> Iterator[Order]:
    """Keep every set in turn; only the empty one where there are too many."""
    weights = range(len(problem.weights))
    for count in range(len(weights) + 1 if len(weights) <= _FEW else 1):
        yield from ((subset, count) for subset in combinations(weights, count))


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


def near_intervals(
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


def _in_order(problem: Problem, streamed: Sequence[int]) -> tuple[int | None, ...] | None:
    return _choose_links(problem, streamed, balanced=False)


def _last_nearest(problem: Problem, streamed: Sequence[int]) -> tuple[int | None, ...] | None:
    return _choose_links(problem, streamed[::-1], balanced=False)


def _balanced(problem: Problem, streamed: Sequence[int]) -> tuple[int | None, ...] | None:
    return _choose_links(problem, streamed, balanced=True)


def _choose_links(
    problem: Problem, streamed: Sequence[int], *, balanced: bool
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
