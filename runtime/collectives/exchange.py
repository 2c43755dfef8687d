"""Exchange: sums and transfers between the ranks of a job, for the ops of the run under way.

All of it is built from two collectives of ``torch.distributed`` that every backend has for parts of any size: Gloo
refuses gathers of unequal parts. [Empirical] Between two processes of one host, 16 MiB: 1.4 GB/s for
``all_to_all_single`` against 0.2 for ``reduce_scatter_tensor`` and 0.8 for ``all_gather_into_tensor``.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gascompile.core.errors import RankError
from gascompile.runtime.collectives.letters import Letters

_SOON_S, _LATER_S, _LATE = 5e-5, 1e-3, 1 / 16
"""Between two looks at an exchange: the least, the most, and the share of what has passed, by which it ends late."""
_LOOK_S = 1.0
"""Between two looks whether the other ranks are still there."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An exchange under way, and the memory that it reads and writes until its end."""

    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor
    sizes: tuple[int, ...]


class Exchange:
    """One rank's end of the exchanges of a group. Ranks have to begin the same ones in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, why: Callable[[BaseException], RankError]
    ) -> None:
        """Use ``group``; ``why`` says what broke an exchange."""
        self._group: dist.ProcessGroup | None = group
        self._letters = Letters(group)
        self._why = why
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.silent_s = 1800.0
        """An exchange that takes longer is broken."""
        self.is_broken: Callable[[], bool] = bool
        """Whether another rank has failed or is gone, as far as this one can see."""
        self.is_hung = False
        """An exchange is under way that nothing ends."""
        self.time_s = 0.0
        """Spent in exchanges so far, waiting for others included, and not what went on beside them."""
        self.first_peer = 0
        """Where the ranks begin that letters are for, of those of the group."""
        self.across: Exchange | None = None
        """That of the ranks that have the same stage of a pipeline, in which pipelines beside each other meet."""
        self._begun: deque[_Begun] = deque()

    def leave(self) -> None:
        """Hold the group no longer: it ends with who holds it last."""
        self.abandon()
        self._group = None
        self._letters.leave()
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
        self._wait(dist.all_reduce, values)

    def add_part(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's part of the sum of ``values`` over the ranks.

        Args:
            values: a vector, of one part after the other.
            sizes: elements of each rank's part.
        """
        received, every = self._room(values, sizes)
        given, counts = self._others(values, sizes)
        self._trade(received, given, every, counts)
        return self._sum(received, values, sizes)

    def begin_part(self, values: torch.Tensor, sizes: Sequence[int]) -> None:
        """Begin what ``add_part`` does; ``end_part`` returns its result, of the first that has begun first.

        Args:
            values: a vector that nobody else has.
            sizes: elements of each rank's part.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        received, every = self._room(values, sizes)
        given, counts = self._others(values, sizes)
        with self._guarded(received, values):
            output, sent = _unowned(received), _unowned(given)
            work = dist.all_to_all_single(
                output, sent, every, counts, group=self._held(), async_op=True
            )
            self._begun.append(_Begun(work, received, values, tuple(sizes)))

    def end_part(self) -> torch.Tensor:
        """Return this rank's part of the sum that was begun first, as soon as it is there.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        begun = self._begun.popleft()
        with self._guarded(begun.received, begun.sent):
            self._finish(begun.work)
        return self._sum(begun.received, begun.sent, begun.sizes)

    def _keeps(self) -> bool:
        """Whether this rank's own part can stay out of an exchange: it is at an end of what goes to the others."""
        return self.rank in (0, self.size - 1)

    def _others(self, values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the elements of a vector that an exchange has to move, and how many are each rank's."""
        if not self._keeps():
            return values, list(sizes)
        own = sizes[self.rank]
        rest = values[own:] if self.rank == 0 else values[: values.numel() - own]
        return rest, [0 if rank == self.rank else size for rank, size in enumerate(sizes)]

    def _room(self, values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return memory for what ranks send of this one's part, and how many elements come from each."""
        every = [sizes[self.rank]] * self.size
        if self._keeps():
            every[self.rank] = 0
        return values.new_empty(sum(every)), every

    def _sum(
        self, received: torch.Tensor, values: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return the sum of what all ranks have of a part, in their order: it does not depend on who computes it."""
        begin, own = sum(sizes[: self.rank]), sizes[self.rank]
        count = self.size - self._keeps()
        parts = list(received.view(count, own))
        if self._keeps():
            parts.insert(self.rank, values[begin : begin + own])
        total: torch.Tensor = parts[0] + parts[1]
        for part in parts[2:]:
            total.add_(part)
        return total

    def gather(
        self, values: torch.Tensor, sizes: Sequence[int], part: torch.Tensor | None = None
    ) -> None:
        """Fill a vector with the parts of all ranks.

        Args:
            values: the vector.
            sizes: elements of each rank's part.
            part: this rank's own; it is in its place in ``values`` already, if ``None``.
        """
        begin, own = sum(sizes[: self.rank]), sizes[self.rank]
        place = values[begin : begin + own]
        sent, every = place if part is None else part, [own] * self.size
        if self._keeps():
            every[self.rank] = 0
            if part is not None:
                place.copy_(part)
        received, counts = self._others(values, sizes)
        count = self.size - self._keeps()
        self._trade(received, sent.repeat(count) if count > 1 else sent, counts, every)

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
        with self._guarded(values):
            if not self._letters.receive(values, self.first_peer + peer, tag, self._waits):
                self.is_hung = True
                raise RuntimeError(f"nothing came within {self.silent_s:.0f} s, or a rank is gone")

    def _waits(self, passed_s: float) -> bool:
        return passed_s < self.silent_s and not self.is_broken()

    def _trade(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """Send each rank its part of ``sent``, and receive as much as it has for this one."""

        def begin(output: torch.Tensor, given: torch.Tensor, **how: Any) -> Any:
            return dist.all_to_all_single(
                output, given, list(received_sizes), list(sent_sizes), **how
            )

        self._wait(begin, received, sent)

    def _wait(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Begin an exchange of ``tensors`` and wait for its end.

        A group's own thread lets go of what it was given a moment after the wait, too late for a plan that counts on
        the memory: it is given tensors that own none.

        Raises:
            RankError: it is broken; names the rank where that is known.
        """
        with self._guarded(*tensors):
            given = [_unowned(tensor) for tensor in tensors]
            self._finish(begin(*given, group=self._held(), async_op=True))

    def _held(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        return self._group

    def _finish(self, work: dist.Work) -> None:
        """Wait for the end of an exchange.

        Raises:
            RuntimeError: it is broken, or takes too long.
        """
        begin_s = time.monotonic()
        while not ends(work, _LOOK_S):
            if not self._waits(time.monotonic() - begin_s):
                self.is_hung = True
                raise RuntimeError(f"nothing came within {self.silent_s:.0f} s, or a rank is gone")

    @contextlib.contextmanager
    def _guarded(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Count the time of an exchange; say what broke it, and keep what it may still write to."""
        begin_s = time.perf_counter()
        try:
            yield
        except BaseException as error:
            _kept.extend(tensors)
            if not isinstance(error, RuntimeError) or isinstance(error, RankError):
                raise
            raise self._why(error) from error
        finally:
            self.time_s += time.perf_counter() - begin_s


def ends(work: dist.Work, time_s: float) -> bool:
    """Wait for the end of an exchange; return whether it came within ``time_s``.

    Gloo's own wait goes on beyond the time that it is given, until that of the group.

    Raises:
        RuntimeError: the exchange is broken.
    """
    begin_s = time.monotonic()
    while not work.is_completed():
        passed_s = time.monotonic() - begin_s
        if passed_s > time_s:
            return False
        time.sleep(min(max(passed_s * _LATE, _SOON_S), _LATER_S))
    work.wait()
    return True


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as a vector that does not keep its memory."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    size_bytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


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
