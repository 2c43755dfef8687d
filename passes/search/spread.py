"""Spread: share streamed weights out among the links, evenly over the program.

Each link gets the bytes that it can carry in the least time that all links need together, and no more
than its tier holds. The weights of a link lie as far apart as they can, so that no link waits for its
turn; what then is left of a fast tier is filled up, since every byte in it spares a slower one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.model.problem import Problem


def spread(problem: Problem, streamed: Sequence[int]) -> tuple[int | None, ...] | None:
    """Return a link per weight, ``None`` for those not streamed; or ``None`` when the tiers are too small.

    Args:
        streamed: weights in the order of their first use.
    """
    shares = _shares(problem, streamed)
    left = dict(problem.room_bytes)
    owed = [0.0] * len(problem.links)
    link_of: list[int | None] = [None] * len(problem.weights)
    for w in streamed:
        size_bytes = problem.weights[w].size_bytes
        for link, share in enumerate(shares):
            owed[link] += share * size_bytes
        fitting = [
            link for link, spec in enumerate(problem.links) if left[spec.source_tier] >= size_bytes
        ]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda link: (owed[link], -link))
        owed[chosen] -= size_bytes
        left[problem.links[chosen].source_tier] -= size_bytes
        link_of[w] = chosen
    for fast in range(len(problem.links)):
        _fill(problem, link_of, left, fast, shares)
    return tuple(link_of)


def _shares(problem: Problem, streamed: Sequence[int]) -> list[float]:
    """Return the part of all streamed bytes that each link carries."""
    total = sum(problem.weights[w].size_bytes for w in streamed)
    time_s, _ = physical_limit(0.0, total, 0, problem.machine, problem.room_bytes, has_hops=False)
    left = float(total)
    shares: list[float] = []
    for link in problem.links:
        room = problem.room_bytes[link.source_tier]
        taken = min(left, room, link.bandwidth_bytes_per_s * time_s)
        shares.append(taken / total if total else 0.0)
        left -= taken
    return shares


def _fill(
    problem: Problem,
    link_of: list[int | None],
    left: dict[str, int],
    fast: int,
    shares: Sequence[float],
) -> None:
    """Move weights of slower links to ``fast``, or exchange them for smaller ones, until its tier is full.

    Only where the tier's size is what limits the link's share.
    """
    tier = problem.links[fast].source_tier
    sizes = [weight.size_bytes for weight in problem.weights]
    streamed_bytes = sum(sizes[w] for w, link in enumerate(link_of) if link is not None)
    if shares[fast] * streamed_bytes < problem.room_bytes[tier]:
        return
    while True:
        slow: dict[int, list[int]] = {}
        own: dict[int, list[int]] = {0: []}
        for w, link in enumerate(link_of):
            if link is not None and link > fast:
                slow.setdefault(sizes[w], []).append(w)
            elif link == fast:
                own.setdefault(sizes[w], []).append(w)
        gains = [(a - b, a, b) for a in slow for b in own if 0 < a - b <= left[tier]]
        if not gains:
            return
        gain, taken, given = max(gains)
        # From the middle of each list, where the even spread changes least.
        incoming = slow[taken][len(slow[taken]) // 2]
        source = link_of[incoming]
        assert source is not None
        if own[given]:
            link_of[own[given][len(own[given]) // 2]] = source
        link_of[incoming] = fast
        left[tier] -= gain
        left[problem.links[source].source_tier] += gain
