"""The clock of links and pipes: when a transfer begins, given when it is issued and what was issued before.

A link serves its transfers one after the other in the order in which they are issued. A pipe that links share
admits a transfer when the bytes of the one before would have passed at the pipe's own bandwidth. All that tells
how long a list of moves takes goes by this clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.core.machine import Link, Machine

Pipes = Sequence[tuple[int, float]]
"""``(pipe index, seconds)`` for which a transfer keeps a pipe from the next one."""


class Clock:
    """When each link and each pipe of a machine is free, by their numbers in it."""

    __slots__ = ("link_free", "pipe_free")

    def __init__(self, link_free: list[float], pipe_free: list[float]) -> None:
        self.link_free = link_free
        self.pipe_free = pipe_free

    def issue(self, link: int, seconds: float, pipes: Pipes, now: float) -> float:
        """Take a link for ``seconds``; return when the transfer begins.

        Args:
            link: the transfer's.
            seconds: how long it is on the link.
            pipes: what it takes of pipes.
            now: when it is issued.
        """
        free = self.link_free[link]
        # The inner loop of every search: a comparison takes a quarter of a call of max.
        begun = free if free > now else now
        if pipes:
            pipe_free = self.pipe_free
            for pipe, _ in pipes:
                free = pipe_free[pipe]
                begun = free if free > begun else begun
            for pipe, pipe_s in pipes:
                pipe_free[pipe] = begun + pipe_s
        self.link_free[link] = begun + seconds
        return begun

    def issue_ahead(self, link: int, seconds: float, now: float) -> float:
        """Let a transfer that compute waits for go beside what its link is at; return when it begins.

        Others have the less of the link, also those that are issued earlier and stand later in a plan.
        """
        self.link_free[link] += seconds
        return now

    @classmethod
    def of(cls, num_links: int, num_pipes: int) -> Clock:
        """Return the clock of a beginning, at which everything is free."""
        return cls([0.0] * num_links, [0.0] * num_pipes)

    def times(self) -> list[float]:
        """Return when all links and pipes are free."""
        return [*self.link_free, *self.pipe_free]

    def shift(self, seconds: float) -> None:
        """Count from ``seconds`` later on; what then lies in the past is 0."""
        self.link_free = [max(0.0, free - seconds) for free in self.link_free]
        self.pipe_free = [max(0.0, free - seconds) for free in self.pipe_free]


def pipe_times(machine: Machine, link: Link, size_bytes: int) -> tuple[tuple[int, float], ...]:
    """Return ``(pipe index, seconds)`` of a transfer of ``size_bytes`` over ``link``."""
    return tuple(
        (i, link.pipe_bytes(size_bytes) / pipe.bandwidth_bytes_per_s)
        for i, pipe in enumerate(machine.pipes)
        if pipe.name in link.shared
    )
