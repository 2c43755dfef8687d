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


def ways_of(problem: Problem, *, has_hops: bool = True) -> tuple[Way, ...]:
    """Return the ways of a problem: its links in their order, and then those in two hops, where these count."""
    links = list(enumerate(problem.links))
    direct = [Way(position, link, None, position) for position, link in links]
    fed = [
        Way(position, push, feed, home)
        for feed, push in (problem.machine.two_hops() if has_hops else ())
        for position, link in links
        if link == push
        for home, other in links
        if other.source_tier == feed.source_tier
    ]
    return (*direct, *fed)
