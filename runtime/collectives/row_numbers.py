"""Row numbers: random numbers of a global batch, of which each rank keeps those of its own rows.

Every rank's generator passes over the numbers of all rows, as one process's does that has the whole batch. What a
rank draws for a row depends on the row's place in the batch alone, and all generators are left in the same state.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from gascompile.core.errors import RankError, UnsupportedOpError

PIECE = 1 << 14
"""Elements that are drawn at once and dropped: of other ranks' rows. [Empirical] Larger ones leave the cache and take
no less time; a multiple of 16, in which torch draws normal numbers."""
_GROUP = 16  # normal numbers that torch draws together; fewer it draws otherwise
Draw = Callable[[torch.Tensor, Sequence[float]], object]
LAWS: dict[str, Draw] = {
    "bernoulli": lambda values, numbers: values.bernoulli_(numbers[0]),
    "uniform": lambda values, numbers: values.uniform_(numbers[0], numbers[1]),
    "normal": lambda values, numbers: values.normal_(numbers[0], numbers[1]),
    "exponential": lambda values, numbers: values.exponential_(numbers[0]),
    "integers": lambda values, numbers: values.random_(int(numbers[0]), int(numbers[1])),
}
"""What is drawn, in place, by its name and numbers."""
_PLAIN = {
    "bernoulli": (0.7,),
    "uniform": (0.0, 1.0),
    "normal": (0.0, 1.0),
    "exponential": (1.0,),
    "integers": (0, 100),  # of every dtype
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """Where a rank's rows are in the global batch."""

    first: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How rows lie in a tensor's elements, in the order in which they are drawn."""

    outer: int
    """Times that all rows come, one after the other: 1 where the rows are the first dimension."""
    rows: int
    """This rank's."""
    inner: int
    """Elements of a row each time."""


_places: list[RowPlace] = []


@contextlib.contextmanager
def placed(place: RowPlace) -> Iterator[None]:
    """Let ops that run within draw for the rows at ``place``."""
    _places.append(place)
    try:
        yield
    finally:
        _places.remove(place)


def place_now(rows: int, ranks: int) -> RowPlace:
    """Return where this rank's rows are; outside of a step, as while ops are timed, as if it were the first one."""
    return _places[-1] if _places else RowPlace(first=0, total=rows * ranks)


def fill(
    flat: torch.Tensor, law: str, numbers: Sequence[float], lies: Geometry, at: RowPlace
) -> None:
    """Draw this rank's part of what one process draws for all rows.

    Args:
        flat: a vector of this rank's elements, in the order of draws.
        law: one of ``LAWS``.
        numbers: that it takes.
        lies: where rows are in ``flat``.
        at: where they are in the global batch.

    Raises:
        RankError: the batch has fewer rows than this rank.
    """
    left = at.total - at.first - lies.rows
    if left < 0:
        raise RankError(
            f"rows {at.first} to {at.first + lies.rows} of a global batch of {at.total}: ranks do not agree on it"
        )
    require_in_pieces(law, flat.dtype)
    if law == "normal":
        _fill_by_groups(flat, LAWS[law], numbers, lies, at)
        return
    own, before, after = (count * lies.inner for count in (lies.rows, at.first, left))
    _pass_over(flat, law, numbers, before)
    for begin in range(0, lies.outer * own, own):
        if begin:
            _pass_over(flat, law, numbers, after + before)
        LAWS[law](flat[begin : begin + own], numbers)
    _pass_over(flat, law, numbers, after)


def _pass_over(like: torch.Tensor, law: str, numbers: Sequence[float], count: int) -> None:
    """Draw numbers of other ranks' rows."""
    piece = like.new_empty(min(count, PIECE))
    while count:
        LAWS[law](piece[:count], numbers)
        count -= min(count, PIECE)


def _fill_by_groups(
    flat: torch.Tensor, draw: Draw, numbers: Sequence[float], lies: Geometry, at: RowPlace
) -> None:
    """Draw all, in pieces of whole groups, and keep what is this rank's.

    Torch draws normal numbers in groups of 16, and the last 16 once more where they are no whole group.
    """
    own, begin = lies.rows * lies.inner, at.first * lies.inner
    every = at.total * lies.inner
    count, done = every * lies.outer, 0
    while done < count:
        # The last piece has a group at least, or all there is.
        size = PIECE if count - done >= PIECE + _GROUP else count - done
        piece = flat.new_empty(size)
        draw(piece, numbers)
        for number in range(done // every, (done + size - 1) // every + 1):
            first = number * every + begin
            low, high = max(first, done), min(first + own, done + size)
            if low < high:
                to = number * own + low - first
                flat[to : to + high - low].copy_(piece[low - done : high - done])
        done += size


@cache
def require_in_pieces(law: str, dtype: torch.dtype) -> None:
    """Refuse a law that torch does not draw one number after the other on this processor.

    Some builds draw Bernoulli and exponential numbers of Intel's processors by streams of MKL, each seeded by one
    number, of which no part can be drawn alone.

    Raises:
        UnsupportedOpError: it draws other numbers in pieces than at once.
    """
    with torch.random.fork_rng(devices=()):
        draws, states = [], []
        for cuts in ((0, 1003), (0, 16, 320, 1003)):
            torch.manual_seed(7)
            values = torch.empty(1003, dtype=dtype)
            for begin, end in itertools.pairwise(cuts):
                LAWS[law](values[begin:end], _PLAIN[law])
            draws.append(values)
            states.append(torch.get_rng_state())
    if not torch.equal(*draws) or not torch.equal(*states):
        raise UnsupportedOpError(
            f"torch draws {law} numbers of {dtype} on this processor at once and not one by one, so that a rank cannot "
            "draw those of its rows alone: train without dropout, or in one process"
        )
