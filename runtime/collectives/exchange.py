"""Exchange: sums and transfers between the ranks of a job, for the ops of the run under way.

All of it is built from sums of whole tensors and from trades, in which each rank gives each other a part of any size:
Gloo refuses gathers of unequal parts. [Empirical] Between two processes of one host, 16 MiB: 1.4 GB/s for
``all_to_all_single`` against 0.2 for ``reduce_scatter_tensor`` and 0.8 for ``all_gather_into_tensor``.

Where all ranks are processes of one host that may read each other's memory, they do that instead. Sums are in the order
of the ranks either way.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gascompile.core.errors import RankError
from gascompile.runtime.collectives.group_work import ends, unowned
from gascompile.runtime.collectives.letters import Letters
from gascompile.runtime.collectives.peer_memory import PeerMemory, Reading, Want
from gascompile.runtime.collectives.trades import Trades
from gascompile.runtime.collectives.waiting import Waiting

_SMALL_BYTES = 64 << 10
"""Of the others' values, which are read whole to add them up: beyond that each rank adds up a part for all."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An exchange under way, and the memory that it reads and writes until its end."""

    work: dist.Work | Reading | Waiting
    received: torch.Tensor
    sent: torch.Tensor
    sizes: list[int]


class Exchange:
    """One rank's end of the exchanges of a group. Ranks have to begin the same ones in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, why: Callable[[BaseException], RankError]
    ) -> None:
        """Use ``group``; ``why`` says what broke an exchange."""
        self._group: dist.ProcessGroup | None = group
        self._letters, self._trades = Letters(group), Trades(group)
        self._why = why
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.silent_s = 1800.0
        """An exchange that takes longer is broken."""
        self.is_broken: Callable[[], bool] = bool
        """Whether another rank has failed or is gone, as far as this one can see."""
        self.is_hung = False
        """An exchange is under way that nothing ends."""
        self.time_s = 0.0
        """Spent in exchanges so far, waiting for others included, and not what went on beside them. Where ranks read
        each other's memory it is waiting alone: what they copy and add up themselves depends on how fast they are."""
        self.first_peer = 0
        """Where the ranks begin that letters are for, of those of the group."""
        self.across: Exchange | None = None
        """That of the ranks that have the same stage of a pipeline, in which pipelines beside each other meet."""
        self._begun: deque[_Begun] = deque()
        self._memory: PeerMemory | None = None

    def meet(self, gather: Callable[[str, str], list[str]]) -> None:
        """Read the other ranks' memory from here on, if all can; ``gather`` returns what each says of a topic.

        Raises:
            RankError: a rank is gone, or has failed.
        """
        memory = PeerMemory(self.rank)
        finds = memory.finds(gather("where", memory.told()))
        if all(answer == "yes" for answer in gather("found", "yes" if finds else "no")):
            self._memory = memory

    @property
    def reads(self) -> bool:
        """Whether ranks read each other's memory."""
        return self._memory is not None

    def leave(self) -> None:
        """Hold the group no longer: it ends with who holds it last."""
        self.abandon()
        self._group = None
        self._letters.leave()
        self._trades.leave()
        if self._memory is not None:
            self._memory.leave()
        if self.across is not None:
            self.across.leave()

    def abandon(self) -> None:
        """Wait for no exchange that has begun: nobody knows whether the other ranks go on with it."""
        for begun in self._begun:
            self.is_hung = True
            # What it may still read and write.
            _kept.extend((begun.received, begun.sent))
        self._begun.clear()

    def add(self, values: torch.Tensor) -> None:
        """Replace a dense tensor by its sum over the ranks, which has the same bits on each."""
        memory = self._reading(values)
        if memory is None:
            self._wait(dist.all_reduce, values)
            return
        flat = values.as_strided((values.numel(),), (1,))
        if self.size > 2 and values.nbytes * (self.size - 1) > _SMALL_BYTES:
            count = -(-flat.numel() // self.size)
            sizes = [min(count, max(flat.numel() - count * rank, 0)) for rank in range(self.size)]
            self.gather(flat, sizes, self.add_part(flat, sizes))
            return
        received = flat.new_empty(self.size - 1, flat.numel())
        parts = list(received)
        self._done(_Begun(self._take_whole(memory, flat, parts), received, flat, [flat.numel()]))
        parts.insert(self.rank, flat)
        flat.copy_(_sum(parts))

    def _take_whole(
        self, memory: PeerMemory, values: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> Reading:
        peers = zip(self._peers(), parts, strict=True)
        wants = [Want(peer, values.nbytes, 0, part) for peer, part in peers]
        with self._guarded(values):
            return memory.offer(values, wants, self._waits)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def add_part(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's part of the sum of ``values`` over the ranks.

        Args:
            values: a vector, of one part after the other.
            sizes: elements of each rank's part.
        """
        return self._sum(self._done(self._begin_sum(values, sizes)))

    def begin_part(self, values: torch.Tensor, sizes: Sequence[int]) -> None:
        """Begin what ``add_part`` does; ``end_part`` returns its result, of the first that has begun first.

        Args:
            values: a vector that nobody else has.
            sizes: elements of each rank's part.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        self._begun.append(self._begin_sum(values, sizes))

    def end_part(self) -> torch.Tensor:
        """Return this rank's part of the sum that was begun first, as soon as it is there.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        return self._sum(self._done(self._begun.popleft()))

    def gather(
        self, values: torch.Tensor, sizes: Sequence[int], part: torch.Tensor | None = None
    ) -> None:
        """Fill a vector with the parts of all ranks.

        Args:
            values: the vector.
            sizes: elements of each rank's part.
            part: this rank's own; it is in its place in ``values`` already, if ``None``.
        """
        place = values.split(list(sizes))[self.rank]
        if part is not None:
            place.copy_(part)
        self._done(self._begin_gather(values, sizes, place if part is None else part))

    def begin_gather(self, values: torch.Tensor, sizes: Sequence[int]) -> None:
        """Begin to gather the parts of a vector, of which this rank's is as it is to be, and may move meanwhile."""
        received = torch.empty_like(values)
        place = values.split(list(sizes))[self.rank]
        self._begun.append(self._begin_gather(received, sizes, place.clone()))

    def end_gather(self, values: torch.Tensor) -> None:
        """Fill the rest of a vector whose parts were begun to be gathered, of all that has begun first.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        begun = self._done(self._begun.popleft())
        parts = zip(values.split(begun.sizes), begun.received.split(begun.sizes), strict=True)
        for rank, (place, part) in enumerate(parts):
            if rank != self.rank:
                place.copy_(part)

    def _done(self, begun: _Begun) -> _Begun:
        with self._guarded(begun.received, begun.sent):
            self._finish(begun.work)
        return begun

    def _reading(self, values: torch.Tensor) -> PeerMemory | None:
        """Return the other ranks' memory, where they can read these values."""
        return self._memory if values.device.type == "cpu" else None

    def _begin_sum(self, values: torch.Tensor, sizes: Sequence[int]) -> _Begun:
        own, received_sizes = sizes[self.rank], [sizes[self.rank]] * self.size
        if self._keeps(values):
            received_sizes[self.rank] = 0
        received = values.new_empty(sum(received_sizes))
        with self._guarded(values, received):
            if (memory := self._reading(values)) is not None:
                offset_bytes = sum(sizes[: self.rank]) * values.element_size()
                parts = zip(self._peers(), received.view(self.size - 1, own), strict=True)
                wants = [Want(peer, values.nbytes, offset_bytes, part) for peer, part in parts]
                reading = memory.offer(values, wants, self._waits)
                return _Begun(reading, received, values, list(sizes))
            given, counts = self._others(values, sizes)
            work = self._begin_trade(received, given, received_sizes, counts)
            return _Begun(work, received, values, list(sizes))

    def _begin_gather(
        self, values: torch.Tensor, sizes: Sequence[int], part: torch.Tensor
    ) -> _Begun:
        with self._guarded(values, part):
            if (memory := self._reading(values)) is not None:
                places = values.split(list(sizes))
                wants = [Want(peer, places[peer].nbytes, 0, places[peer]) for peer in self._peers()]
                return _Begun(memory.offer(part, wants, self._waits), values, part, list(sizes))
            sent_sizes = [sizes[self.rank]] * self.size
            if self._keeps(values):
                sent_sizes[self.rank] = 0
            received, counts = self._others(values, sizes)
            count = self.size - self._keeps(values)
            sent = part.repeat(count) if count > 1 else part
            work = self._begin_trade(received, sent, counts, sent_sizes)
            return _Begun(work, values, sent, list(sizes))

    def _keeps(self, values: torch.Tensor) -> bool:
        """Whether this rank's own part can stay out of an exchange: it is at an end of what goes to the others."""
        return self._reading(values) is not None or self.rank in (0, self.size - 1)

    def _others(self, values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the elements of a vector that an exchange has to move, and how many are each rank's."""
        if not self._keeps(values):
            return values, list(sizes)
        own = sizes[self.rank]
        rest = values[own:] if self.rank == 0 else values[: values.numel() - own]
        return rest, [0 if rank == self.rank else size for rank, size in enumerate(sizes)]

    def _sum(self, begun: _Begun) -> torch.Tensor:
        """Return the sum of what all ranks have of a part, in their order: it does not depend on who computes it."""
        own, keeps = begun.sizes[self.rank], self._keeps(begun.sent)
        parts = list(begun.received.view(self.size - keeps, own))
        if keeps:
            parts.insert(self.rank, begun.sent.split(begun.sizes)[self.rank])
        return _sum(parts)

    def send(self, value: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to send a tensor to stage ``peer``, which receives it under the same ``tag``.

        Raises:
            RankError: an exchange is broken; names the rank where that is known.
        """
        with self._guarded():
            self._letters.send(value, self.first_peer + peer, tag)

    def receive(self, values: torch.Tensor, peer: int, tag: int) -> None:
        """Fill a tensor with what stage ``peer`` has sent under ``tag``.

        Raises:
            RankError: an exchange is broken; names the rank where that is known.
        """
        with self._guarded(values, by_letter=True):
            if not self._letters.receive(values, self.first_peer + peer, tag, self._waits):
                self.is_hung = True
                raise RuntimeError(f"nothing came within {self.silent_s:.0f} s, or a rank is gone")

    def _waits(self, passed_s: float) -> bool:
        return passed_s < self.silent_s and not self.is_broken()

    def _begin_trade(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> dist.Work | Waiting:
        """Begin to send each rank its part of ``sent``, and to receive as much as it has for this one."""
        if received.device.type == "cpu":
            return self._trades.begin(received, sent, received_sizes, sent_sizes)
        output, given = unowned(received), unowned(sent)
        how: dict[str, Any] = {"group": self._held(), "async_op": True}
        sizes = (list(received_sizes), list(sent_sizes))
        work: dist.Work = dist.all_to_all_single(output, given, *sizes, **how)
        return work

    def _wait(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Begin an exchange of ``tensors`` and wait for its end.

        A group's own thread lets go of what it was given a moment after the wait, too late for a plan that counts on
        the memory: it is given tensors that own none.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        with self._guarded(*tensors):
            given = [unowned(tensor) for tensor in tensors]
            self._finish(begin(*given, group=self._held(), async_op=True))

    def _held(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        return self._group

    def _finish(self, work: dist.Work | Reading | Waiting) -> None:
        """Wait for the end of an exchange.

        Raises:
            RuntimeError: it is broken, or takes too long.
        """
        if isinstance(work, Reading):
            assert self._memory is not None, "it has begun"
            self._memory.finish(work, self._waits)
            return
        waits = self._waits
        if not (work.ends(waits) if isinstance(work, Waiting) else ends(work, waits)):
            self.is_hung = True
            raise RuntimeError(f"nothing came within {self.silent_s:.0f} s, or a rank is gone")

    @contextlib.contextmanager
    def _guarded(self, *tensors: torch.Tensor, by_letter: bool = False) -> Iterator[None]:
        """Count the time of an exchange; say what broke it, and keep what it may still write to."""
        memory = self._reading(tensors[0]) if tensors and not by_letter else None
        begin_s = time.perf_counter() if memory is None else memory.waited_s
        try:
            yield
        except BaseException as error:
            _kept.extend(tensors)
            if memory is not None:
                # Nobody is to take what this rank changes from here on.
                memory.leave()
            if not isinstance(error, RuntimeError) or isinstance(error, RankError):
                raise
            raise self._why(error) from error
        finally:
            now_s = time.perf_counter() if memory is None else memory.waited_s
            self.time_s += now_s - begin_s


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' values, in their order."""
    total: torch.Tensor = parts[0] + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total


_kept: list[torch.Tensor] = []
_under_way: list[Exchange] = []


@contextlib.contextmanager
def exchanging(exchange: Exchange | None) -> Iterator[None]:
    """Let ops that run within use ``exchange``."""
    if exchange is None:
        yield
        return
    _under_way.append(exchange)
    try:
        yield
    finally:
        _under_way.remove(exchange)
        exchange.abandon()


def exchange_under_way() -> Exchange:
    """Return what the ops of the run under way use.

    Raises:
        RankError: an op of several ranks runs outside of a step.
    """
    if not _under_way:
        raise RankError(
            "an op that needs other ranks runs outside of their step; call the step itself"
        )
    return _under_way[-1]
