"""Own moves: what ops lose to what their rank moves to and from its drive, with the ops and moves of all ranks at work.

Threads that read and write want a processor, and so do the calls that start them and the memory that they take. A
machine is measured with processors to spare; ranks that have one each give it up while they move anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from gascompile.core.huge_pages import map_anonymous
from gascompile.core.sizes import MIB, SPILL_BUFFER_BYTES
from gascompile.distributed.beside import Ops, meet
from gascompile.runtime.collectives.exchange import Exchange
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.protocols import Ticket

_BYTES, _MOST_TENSORS, _FEWEST_TENSORS = MIB, 48, 4
"""Tensors that go out and come back, about as large as parts of parameters and activations are."""
_LONG_S = 0.15
"""For which they do: what holds processors to a share of their time looks at some 20 ms."""
_LONGER = 1.5
"""Ops between two moves, beside what a move takes alone, so that none is waited for."""
_REPEATS = 5
"""Pairs of rounds without moves and with them, of whose differences the median counts: [Empirical] the least of both
counts is of no one moment, and found 0 to 0.2 ns a byte where steps lost 0.5."""


class OwnMoves:
    """Tensors that move between memory and a drive, as those of a step do. Close it when all is measured."""

    def __init__(self, folder: Path, pages: Pages | None) -> None:
        """Take room.

        Args:
            folder: where the values of steps lie.
            pages: where their memory comes from; else the heap.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self._names = [str(number) for number in range(_MOST_TENSORS)]
        zeros = dict.fromkeys(self._names, (_BYTES // torch.float32.itemsize, torch.float32))
        self._buffers = map_anonymous(2 * SPILL_BUFFER_BYTES)
        self._store = Persistent({}, zeros, folder, memoryview(self._buffers), pages)

    def close(self) -> None:
        """Give the room back."""
        self._store.close()

    def lost_s_per_byte(self, exchange: Exchange, ops: Ops) -> float:
        """Return what ops lose for each byte that moves; all ranks measure at once.

        Raises:
            StorageError: nothing can be read or written.
        """
        self._round(self._names)  # takes the file's space and the memory
        alone_s = self._round(self._names[:_FEWEST_TENSORS]) / (2 * _FEWEST_TENSORS)
        count = max(int(_LONGER * alone_s / max(ops.seconds(4) / 4, 1e-6)), 1)
        gap_s = ops.seconds(count)
        several = int(_LONG_S / (2 * gap_s))
        names = self._names[: max(min(several, _MOST_TENSORS), _FEWEST_TENSORS)]
        lost_s = []
        for _ in range(_REPEATS):
            meet(exchange)
            plain_s = ops.seconds(2 * len(names) * count)
            meet(exchange)
            lost_s.append(self._round(names, lambda: ops.run(count)) - plain_s)
        return max(sorted(lost_s)[_REPEATS // 2], 0.0) / (2 * len(names) * _BYTES)

    def _round(self, names: list[str], beside: Callable[[], object] | None = None) -> float:
        """Let tensors come and go; return the seconds, of which waits are no part where ops run beside each move."""
        begin_s, waited_s = time.perf_counter(), 0.0
        store = self._store
        for name in names:
            coming = store.read(name)
            if beside is not None:
                beside()
            waited_s += _waited_s(coming)
            store.changed((name,))
            going = store.write(name)
            if beside is not None:
                beside()
            waited_s += _waited_s(going)
            store.drop(name)
        passed_s = time.perf_counter() - begin_s
        return passed_s if beside is None else passed_s - waited_s


def _waited_s(ticket: Ticket) -> float:
    begin_s = time.perf_counter()
    ticket.wait()
    return time.perf_counter() - begin_s
