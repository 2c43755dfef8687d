"""What ops lose to what goes on beside them, with the ops of all ranks of a host at work at once.

Ranks share a host's cores, caches and memory: what one rank finds by itself is too little. All of them call these at
the same time, and begin together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gascompile.runtime.collectives.exchange import Exchange

_ROUNDS, _ROUNDS_S = 4, 0.1
"""Exchanges with ops beside them, one after the other, and how long those are to take together: five times as long as
what holds processors to a share of their time looks at, some 20 ms."""
_REPEATS = 2  # the least of both counts: others may have disturbed one
_BETWEEN_S, _ROUNDS_OF_A_GROUP, _GROUPS = 4e-3, 8, 5
"""Ops between two exchanges, as in steps of small models; of a few groups the one next to the least leaves out what
other programs of this host do for a moment. [Empirical] Two ranks of an idle host waited 8 % of their ops in a step."""
_ALONE = 9
"""Small exchanges without ops between them, of which the median is what one takes by itself."""
_OP_ROWS = 192
"""Of a product of matrices that stands for ops: 0.2 ms, and more than a core's own cache has room for."""
_STREAMED = 1 << 20
"""Elements of what is read and written beside it: some 0.4 ms, as activations and updates of 4 MiB are."""


class Ops:
    """What stands for the ops of a step."""

    def __init__(self, *, streams: bool = False) -> None:
        """Run once, to find the libraries loaded; each reads and writes memory beside its product, if told so."""
        self._matrix = torch.ones(_OP_ROWS, _OP_ROWS)
        self._stream = torch.ones(_STREAMED) if streams else None
        self.run(2)

    def run(self, count: int) -> None:
        """Run so many."""
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)
            if self._stream is not None:
                self._stream.mul_(1.0)

    def seconds(self, count: int) -> float:
        """Return what so many take."""
        begin_s = time.perf_counter()
        self.run(count)
        return time.perf_counter() - begin_s


def lost_to_exchange_s(
    exchange: Exchange, ops: Ops, begin: Callable[[], None], alone_s: float
) -> float:
    """Return what ops lose to a sum of parts that goes on beside them, from when it has begun.

    Args:
        exchange: with the other ranks.
        ops: that run beside it.
        begin: begins it.
        alone_s: what it takes by itself, as far as this rank knows.
    """
    # Twice as long as the exchange by itself, so that it ends before they do.
    count = max(int(2 * alone_s * _ROUNDS / max(ops.seconds(_ROUNDS), 1e-6)), 1)
    # All ranks make as many.
    slowest = torch.zeros(exchange.size)
    slowest[exchange.rank] = alone_s
    exchange.add(slowest)
    rounds = min(max(round(_ROUNDS_S / float(slowest.max())), 1), _ROUNDS)
    lost_s = []
    for _ in range(_REPEATS):
        meet(exchange)
        plain_s = ops.seconds(rounds * count)
        meet(exchange)
        first_s, begun_s = time.perf_counter(), 0.0
        for _ in range(rounds):
            begin_s = time.perf_counter()
            begin()
            begun_s += time.perf_counter() - begin_s
            ops.run(count)
            exchange.end_part()
        lost_s.append((time.perf_counter() - first_s - begun_s - plain_s) / rounds)
    return max(min(lost_s), 0.0)


def late_share(exchange: Exchange, ops: Ops, trade: Callable[[], None]) -> float:
    """Return what ranks wait for whoever comes last to an exchange, as a share of the ops since the one before.

    The same ops take a little longer now on the one rank, now on the other: with exchanges between them all ranks
    take longer than the slowest and its exchanges by themselves.

    Args:
        exchange: with the other ranks.
        ops: of a step.
        trade: a small exchange.
    """
    meet(exchange)
    alone_s = sorted(_seconds(trade) for _ in range(_ALONE))[_ALONE // 2]
    count = max(int(_BETWEEN_S * _ROUNDS / max(ops.seconds(_ROUNDS), 1e-6)), 1)
    late_shares = []
    for _ in range(_GROUPS):
        meet(exchange)
        first_s, own_s = time.perf_counter(), 0.0
        for _ in range(_ROUNDS_OF_A_GROUP):
            own_s += ops.seconds(count)
            trade()
        all_s = time.perf_counter() - first_s
        table = torch.zeros(exchange.size)
        table[exchange.rank] = own_s
        exchange.add(table)
        slowest_s = float(table.max())
        late_shares.append((all_s - slowest_s - _ROUNDS_OF_A_GROUP * alone_s) / slowest_s)
    return max(sorted(late_shares)[1], 0.0)


def _seconds(act: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s


def meet(exchange: Exchange) -> None:
    """Return when all ranks are here."""
    exchange.add(torch.zeros(1))
