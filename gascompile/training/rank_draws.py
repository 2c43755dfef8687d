"""Rank draws: the random numbers of a step of several ranks, which are those of rank 0's generator for all rows.

A rank whose own generator is in the same state goes on with it, as one process does; another's is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from gascompile.core import serial
from gascompile.distributed.ranks import Ranks
from gascompile.distributed.rows import num_rows
from gascompile.runtime.collectives.row_numbers import RowPlace, placed
from gascompile.training.planning import row_draws

_log = logging.getLogger(__name__)
_NOTHING = 0  # what a unit without draws tells the others


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnByRows:
    """What the run at hand draws, as numbers that ranks compare."""

    numbers: tuple[int, int]
    """Of what is drawn for a row, and of the state of this rank's generator; zeros where nothing is drawn."""
    rows: int
    """Of this rank; 1 where nothing is drawn by rows."""


class RankDraws:
    """The random numbers of the runs of one rank's step."""

    def __init__(self, ranks: Ranks) -> None:
        """Know the ranks."""
        self._ranks = ranks
        self._described: WeakKeyDictionary[fx.GraphModule, tuple[int, bool]] = WeakKeyDictionary()
        """Digests of what programs draw, and whether some of it is drawn by rows."""
        self._place: RowPlace | None = None
        self._state: torch.Tensor | None = None
        """Rank 0's, where this rank's is another."""
        self._is_own = False
        self._said = False

    def of(self, graph_module: fx.GraphModule, batch: Any) -> DrawnByRows:
        """Return what a run of a program on this rank's batch draws.

        Raises:
            UnsupportedOpError: it draws by rows, and the batch has no number of them.
        """
        if graph_module not in self._described:
            graph = graph_module.graph
            number = _number(serial.digest(row_draws.described(graph)).encode())
            by_rows = any(
                isinstance(node.target, torch._ops.OpOverload)
                and node.target.namespace == row_draws.NAMESPACE
                for node in graph.nodes
            )
            is_drawing = bool(row_draws.draws_of(graph))
            self._described[graph_module] = (number if is_drawing else _NOTHING, by_rows)
        what, by_rows = self._described[graph_module]
        if what == _NOTHING:
            return DrawnByRows(numbers=(_NOTHING, _NOTHING), rows=1)
        state = torch.get_rng_state()
        return DrawnByRows(
            numbers=(what, _number(state.numpy().tobytes())), rows=num_rows(batch) if by_rows else 1
        )

    def agree(self, table: Sequence[Sequence[int]]) -> None:
        """Know what all ranks draw in the run that comes; all ranks call it.

        Args:
            table: rows, and ``Drawn.numbers``, each of all ranks.

        Raises:
            RankError: a rank has failed.
        """
        rows, whats, states = table
        self._place, self._state, self._is_own = None, None, False
        if not any(whats):
            return
        rank = self._ranks.layout.rank
        if len(set(states)) > 1:
            state = torch.get_rng_state()
            self._ranks.send([state])
            self._state = state if states[rank] != states[0] else None
        self._place = RowPlace(first=sum(rows[:rank]), total=sum(rows))
        self._is_own = len(set(whats)) > 1
        if self._is_own and not self._said:
            self._said = True
            _log.info(
                "rows of different ranks have different sizes: there is no batch of all of them, and each rank draws "
                "random numbers of its own"
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw what was agreed on within."""
        if self._place is None:
            yield
            return
        before, generator = torch.get_rng_state(), torch.default_generator
        after = before if self._state is not None else None
        try:
            if self._state is not None:
                generator.set_state(self._state)
            if self._is_own:
                seed = int(torch.randint(1 << 62, ()))
                after = torch.get_rng_state() if after is None else after
                generator.manual_seed(_number(f"{seed} {self._ranks.layout.rank}".encode()))
            with placed(self._place):
                yield
        finally:
            if after is not None:
                generator.set_state(after)


def _number(of: bytes) -> int:
    """Return a digest that is a positive number of 62 bits."""
    return int.from_bytes(hashlib.blake2b(of, digest_size=8).digest(), "little") >> 2 or 1
