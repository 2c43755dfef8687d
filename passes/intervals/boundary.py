"""Boundary: what is held between the moves at one boundary of runs, and where among them a release has to stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gascompile.passes.intervals.decisions import Kind, Move

_CHANGE = {int(Kind.RELEASE): -1, int(Kind.DROP): -1, int(Kind.LOAD): 1}
"""What moves add of their tensor to the bytes that are there."""


def most_between(moves: Sequence[Move], sizes: Sequence[int], after_bytes: int) -> int:
    """Return the most bytes that are held between two moves of a boundary.

    Args:
        moves: in their order.
        sizes: bytes of the tensor of each interval.
        after_bytes: what is held after all of them.
    """
    changes = [_CHANGE.get(kind, 0) * sizes[j] for kind, j in moves]
    return max(accumulate(changes, initial=after_bytes - sum(changes)))


def beside(
    moves: Sequence[Move],
    sizes: Sequence[int],
    after_bytes: int,
    number: int,
    limit_bytes: int,
) -> int:
    """Return before which of a boundary's moves to release: behind copies back that have room beside it.

    Args:
        number: the interval of what is released, which ``after_bytes`` is without.
        limit_bytes: what may be held.

    The others are those of ``most_between``.
    """
    changes = [_CHANGE.get(kind, 0) * sizes[j] for kind, j in moves]
    free, position = limit_bytes - (after_bytes - sum(changes)) - sizes[number], 0
    for k, (move, change) in enumerate(zip(moves, changes, strict=True)):
        free -= change
        if free < 0 or move[0] >= Kind.STORED or move == (Kind.LOAD, number):
            break
        if move[0] == Kind.LOAD:
            position = k + 1
    return position
