"""Ways: how a weight comes from its home to where ops run, directly or in two hops."""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.core.machine import Link
from gascompile.passes.model.problem import Problem


@dataclass(frozen=True, slots=True)
class Way:
    """Over a link from its home, or over one from a place in between, which another link feeds."""

    position: int
    """Of the problem's links: the last one that the weight takes."""
    link: Link
    """That link."""
    feed: Link | None = None
    """The first of two hops."""
    direct: int = 0
    """Of the problem's links the one from its home."""

    @property
    def home(self) -> str:
        """Where the weight rests."""
        return self.link.source_tier if self.feed is None else self.feed.source_tier

    def uses(self, pipe: str) -> int:
        """Return how often its bytes pass a pipe."""
        return sum(pipe in link.shared for link in (self.link, self.feed) if link is not None)


def direct_ways(problem: Problem) -> tuple[Way, ...]:
    """Return the ways of a problem without a stop: its links, in their order."""
    return tuple(Way(position, link, None, position) for position, link in enumerate(problem.links))


def ways_of(problem: Problem) -> tuple[tuple[Way, ...], ...]:
    """Return the sets of ways that are planned with: all direct, or all that one place holds in the same two hops."""
    direct = direct_ways(problem)
    hops = (tuple(hop if way.home == hop.home else way for way in direct) for hop in _hops(problem))
    return (direct, *hops)


def every_way(problem: Problem) -> tuple[Way, ...]:
    """Return all ways at once, where weights of one place come by several."""
    return (*direct_ways(problem), *_hops(problem))


def _hops(problem: Problem) -> tuple[Way, ...]:
    """Return the ways in two hops.

    What lies for good in a place that holds every weight can be had from there whenever it could be in two hops.
    """
    whole_bytes = sum(weight.size_bytes for weight in problem.weights)
    links = list(enumerate(problem.links))
    return tuple(
        Way(position, push, feed, home)
        for feed, push in problem.machine.two_hops()
        for position, link in links
        if link == push and whole_bytes > problem.room_bytes[push.source_tier]
        for home, other in links
        if other.source_tier == feed.source_tier
    )
