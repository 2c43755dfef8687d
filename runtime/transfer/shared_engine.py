"""Reads of ranks that share an arena: each rank reads its part of every weight, from its own drive.

Ranks ask for the same loads in the same order, that of their program, so a load has the same number on all. Two rules
keep them apart:

- no rank reads load ``k`` before every rank has asked for it: whoever asks is done with what lay there before;
- no rank uses load ``k`` before every rank has delivered its part of it.

A thread of each rank waits for the first; whoever needs a weight waits for the second. Ranks wait for each other only
for loads before the one at hand, so none waits in a circle.
"""

from __future__ import annotations

import queue
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.waiting import Gate, OwnThread
from gascompile.runtime.collectives.local_ranks import NUM_FLAGS, LocalRanks
from gascompile.runtime.protocols import Event, Receive, Ticket, TransferEngine
from gascompile.runtime.transfer.read_plan import Landing, Piece
from gascompile.runtime.transfer.under_way import cancelled

_LEAST_BYTES = 256 << 10
"""Of a part: what is smaller is left to one rank, to each in its turn."""
_SOON_S, _LATER_S = 1e-4, 1e-3
"""Between two looks at what others have asked for, at first and at most."""


class _Load:
    """A weight under way to the arena; a ``Ticket``."""

    __slots__ = (
        "address",
        "begun",
        "error",
        "event",
        "key",
        "landing",
        "link",
        "number",
        "on_done",
        "ranks",
    )

    def __init__(
        self,
        ranks: LocalRanks,
        number: int,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        on_done: Callable[[], None] | None,
    ) -> None:
        self.ranks, self.number = ranks, number
        self.landing, self.address, self.key, self.link = landing, address, key, link
        self.on_done = on_done
        self.begun = False
        """Whether the read of this rank's part has been asked for, as all ranks want the load."""
        self.error: BaseException | None = None
        self.event: Event | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.ranks.missing(self.number) < 0

    @property
    def failed(self) -> bool:
        """Whether a part of it is missing, to be asked once no rank reads: the same on all then."""
        return self.ranks.missing(self.number) >= 0

    def wait(self) -> None:
        try:
            self.ranks.wait(
                lambda: -1 if self.error is not None else self.ranks.missing(self.number)
            )
        except StorageError as error:
            state = "is under way" if self.begun else "has not begun"
            raise StorageError(f"{error}. The read of '{self.landing.name}' {state}") from error
        if self.error is not None:
            raise StorageError(str(self.error)) from self.error.__cause__

    def deliver(self) -> None:
        """Note that this rank's part is there."""
        self.ranks.deliver(self.number)
        if self.on_done is not None:
            self.on_done()


class SharedEngine:
    """A ``TransferEngine`` that reads this rank's parts with another one."""

    def __init__(self, engine: TransferEngine, ranks: LocalRanks) -> None:
        """Own ``engine``, which reads into the memory that ``ranks`` share."""
        self._engine, self._ranks = engine, ranks
        self._number = ranks.first_load()
        self._parts = _Parts(engine, ranks)
        weakref.finalize(self, self._parts.stop).atexit = False

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path that this rank's parts have taken, per link."""
        return self._engine.paths

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | Receive | None = None,
        on_done: Callable[[], None] | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Ask for a tensor, as all ranks do; what goes to memory of this rank's own, it reads alone."""
        if memory is not None:
            return self._engine.submit(
                landing, address, key=key, link=link, memory=memory, on_done=on_done, after=after
            )
        load = _Load(
            self._ranks, self._number, landing, address, key=key, link=link, on_done=on_done
        )
        self._number += 1
        self._parts.put(load)
        self._ranks.submit(self._number)
        return load

    @property
    def num_submitted(self) -> int:
        """Loads that this rank has asked for so far."""
        return self._number

    def go_on_from(self, number: int) -> None:
        """Number the next loads from ``number`` on, once nothing is under way on any rank."""
        self._number = number
        self._ranks.submit(number)

    def drain(self) -> None:
        """Cancel what is queued and block until this rank reads no more."""
        self._parts.cancel()
        self._engine.drain()

    def close(self) -> None:
        """Drain and stop; idempotent."""
        self._parts.stop()
        self._parts.join()
        self._engine.close()


class _Parts:
    """The thread that starts to read this rank's parts, in the order of loads, once all ranks have asked for them."""

    def __init__(self, engine: TransferEngine, ranks: LocalRanks) -> None:
        self._engine, self._ranks = engine, ranks
        self._inbox = queue.SimpleQueue[_Load | Gate | None]()
        self._waiting: deque[_Load] = deque()
        self._started: dict[int, tuple[_Load, Ticket]] = {}
        self._ends = self._is_closed = False
        self._thread = OwnThread(self._work, "gascompile-parts")
        self.put, self.join = self._inbox.put, self._thread.join

    def cancel(self) -> None:
        """Start no part that has not been started; block until that is so."""
        if self._is_closed or not self._thread.is_alive:
            self.join()
            return
        gate = Gate()
        self._inbox.put(gate)
        gate.wait()

    def stop(self) -> None:
        """Let the thread end."""
        self._is_closed = True
        self._inbox.put(None)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        pause_s = _SOON_S
        while not self._ends:
            if self._waiting or self._started:
                # No ``get`` with a timeout: before Python 3.13 it waits for ever where the time is up between two of
                # its own looks, as it is now and then in a group whose processors are held.
                time.sleep(pause_s)
            else:
                self._obey(self._inbox.get())
            while not self._inbox.empty():
                self._obey(self._inbox.get())
            moved = self._end() + self._start()
            pause_s = _SOON_S if moved else min(2 * pause_s, _LATER_S)

    def _obey(self, message: _Load | Gate | None) -> None:
        if isinstance(message, _Load):
            self._waiting.append(message)
            return
        for load in self._waiting:
            load.error = cancelled(load.landing.name)
        self._waiting.clear()
        self._ends = self._ends or message is None
        if message is not None:
            message.open()

    def _start(self) -> int:
        """Start what all ranks have asked for; return how much that was."""
        count, ready = 0, self._ranks.num_submitted if self._waiting else 0
        while self._waiting and self._waiting[0].number < ready:
            number = self._waiting[0].number
            # Flags of the same place are to grow.
            if self._started and number - min(self._started) >= NUM_FLAGS:
                break
            load = self._waiting.popleft()
            part = part_of(load.landing, self._ranks.rank, self._ranks.size, number)
            count += 1
            load.begun = True
            try:
                if not part.pieces:
                    load.deliver()
                    continue
                ticket = self._engine.submit(
                    part, load.address, key=load.key, link=load.link, on_done=load.deliver
                )
                self._started[number] = (load, ticket)
            # Whatever it is, is the waiter's: without this thread others would wait for ever.
            except BaseException as error:  # noqa: BLE001
                load.error = error
        return count

    def _end(self) -> int:
        """Take note of parts that are there or cannot be had; return how many they were."""
        ended = [number for number, (_, ticket) in self._started.items() if ticket.done]
        for number in ended:
            load, ticket = self._started.pop(number)
            try:
                ticket.wait()
            except BaseException as error:  # noqa: BLE001
                load.error = error
        return len(ended)


def part_of(landing: Landing, rank: int, size: int, number: int) -> Landing:
    """Return what one rank reads of a load.

    Args:
        landing: the whole load, which lies alike on all ranks: parts are bounded by places in memory.
        rank: whose part it is.
        size: number of ranks.
        number: of the load, by which small ones are left to the ranks in turn.
    """
    # What ranks agree in: reads may pass the end of the tensor on one, and not on another.
    total_bytes = landing.shift_bytes + landing.size_bytes
    if total_bytes < _LEAST_BYTES * size:
        return landing if rank == number % size else replace(landing, size_bytes=0, pieces=())
    begin, end = (total_bytes * r // size // PAGE_BYTES * PAGE_BYTES for r in (rank, rank + 1))
    if rank == size - 1:
        end = align_up(total_bytes)
    pieces = [_within(piece, begin, end) for piece in landing.pieces]
    kept = tuple(piece for piece in pieces if piece is not None)
    return replace(landing, size_bytes=sum(p.needed_bytes for p in kept), pieces=kept)


def _within(piece: Piece, begin: int, end: int) -> Piece | None:
    """Return the part of a read that fills memory from ``begin`` to ``end``, if bytes of the tensor are in it."""
    first = max(piece.position, begin)
    last = min(piece.position + piece.size_bytes, end)
    before = first - piece.position
    needed_bytes = min(last - first, piece.needed_bytes - before)
    if needed_bytes <= 0:
        return None
    return replace(
        piece,
        offset=piece.offset + before,
        position=first,
        size_bytes=last - first,
        needed_bytes=needed_bytes,
    )
