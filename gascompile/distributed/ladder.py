"""Ladder: what exchanges of a few sizes take between the ranks of a job, measured when they meet.

What was measured is kept and used again as long as the network is about as fast: the same exchange varies from one
measurement to the next, and plans and predictions are not to vary with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.distributed.beside import Ops, late_share, lost_to_exchange_s, meet
from gascompile.distributed.own_moves import OwnMoves
from gascompile.runtime.collectives.exchange import Exchange

_SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20)
"""[Empirical] From 4 MiB on seconds grow with bytes, within the scatter of a shared machine."""
_REPEATS, _MORE, _SHORT_S = 3, 6, 0.05
"""Exchanges of a size, and how many more of those that all are done with so soon. [Empirical] Between two processes of
one host the median of three differs by a third from one meeting to the next, and from one rank to the other."""
_SEVERAL = 4
"""Exchanges under way at once, as those of one layer's parameters are."""
_OTHERS = 1 << 20
"""Elements of what ops touch between two exchanges. [Empirical] Between two processes of one host, 1 MiB that was the
last in the caches takes half the time of what a step has made: 0.11 in place of 0.25 ms for a gather."""
_LATE_ELEMENTS = _SIZES_BYTES[0] // torch.float32.itemsize
_LONG_S = 0.25
"""Beside ops the largest exchange is looked at that all ranks together find shorter. [Empirical] What ops lose to one
of 1 ms is mostly what differs from one look to the next: two ranks that lose 0.15 of it found 0.17 and 0.37."""
_BUSY, _FASTER = 2.0, 1.25
"""What was measured before holds for a network whose largest exchange takes up to so much longer now, as hosts may be
busy, and up to so much less. [Empirical] Between two processes of one busy host the same exchange takes 0.7 to 1.4 of
its median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What an exchange of one size takes."""

    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Seconds by bytes, for sums on all ranks, for sums of parts and for gathers of parts."""

    whole: tuple[Rung, ...]
    part: tuple[Rung, ...]
    gathers: tuple[Rung, ...]
    flows: tuple[Rung, ...]
    """What one of several sums of parts takes that are under way at once: one alone leaves a network idle while it
    starts and while it ends."""
    begins: tuple[Rung, ...]
    """What ops wait for a sum of parts to begin that goes on beside them: for the copy that it is made of."""
    late: float
    """What ranks wait for whoever comes last to an exchange, as a share of the ops since the one before."""
    busy: float = 1.0
    """Share of the time of such a sum that ops beside it lose to it, with those of all ranks at work."""

    moves_s_per_byte: float | None = None
    """What ops lose for each byte that their own rank moves, with those of all ranks at work and all ranks moving;
    ``None`` where nobody has asked."""

    @staticmethod
    def measured(exchange: Exchange, moves: OwnMoves | None = None) -> Ladder:
        """Measure; all ranks do so at once. A second between two processes of one host.

        Args:
            exchange: with the other ranks.
            moves: of this rank, where it is to move anything.
        """
        size = exchange.size

        def sizes_of(values: torch.Tensor) -> list[int]:
            count = values.numel() // size
            return [count] * (size - 1) + [values.numel() - count * (size - 1)]

        def part(values: torch.Tensor) -> None:
            exchange.add_part(values, sizes_of(values))

        def gather(values: torch.Tensor) -> None:
            exchange.gather(values, sizes_of(values))

        def several(values: torch.Tensor) -> None:
            sizes = sizes_of(values)
            for _ in range(_SEVERAL):
                exchange.begin_part(values, sizes)
            for _ in range(_SEVERAL):
                exchange.end_part()

        def begin(values: torch.Tensor) -> None:
            exchange.begin_part(values.clone(), sizes_of(values))

        measured = partial(_measured, exchange)
        parts, ops = measured(part), Ops()
        return Ladder(
            whole=measured(exchange.add),
            part=parts,
            gathers=measured(gather),
            # Ranks that read each other's memory do so one after the other.
            flows=parts if exchange.reads else _shared(measured(several)),
            begins=measured(begin, exchange.end_part),
            late=late_share(exchange, ops, partial(part, torch.zeros(_LATE_ELEMENTS))),
            # Where ranks read each other's memory they do so between ops, and nothing goes on beside these.
            busy=1.0 if exchange.reads else _lost_share(exchange, ops, begin, parts),
            moves_s_per_byte=None
            if moves is None
            else moves.lost_s_per_byte(exchange, Ops(streams=True)),
        )

    def seconds(self, size_bytes: int, *, divided: bool) -> float:
        """Return what an exchange of so many bytes takes.

        Args:
            size_bytes: of the whole tensor or range.
            divided: each rank has a part of the result, or gives a part of it.
        """
        return interpolated(self.part if divided else self.whole, size_bytes)

    def gather_s(self, size_bytes: int) -> float:
        """Return what a gather takes of a vector of so many bytes, of which each rank has a part."""
        return interpolated(self.gathers, size_bytes)

    def flow_s(self, size_bytes: int) -> float:
        """Return what a sum of parts takes where others are under way."""
        return interpolated(self.flows, size_bytes)

    def begin_s(self, size_bytes: int) -> float:
        """Return what it takes to begin a sum of parts that goes on beside ops."""
        return interpolated(self.begins, size_bytes)

    def as_kept(self, path: Path) -> Ladder:
        """Return what is kept in a file, where that is of a network about as fast; else keep this one."""
        kept = Ladder.kept(path)
        if kept is not None and kept._is_like(self) and not kept._lacks_moves(self):
            return kept
        new = (
            replace(self, moves_s_per_byte=kept.moves_s_per_byte)
            if kept is not None and self._lacks_moves(kept)
            else self
        )
        # Without a place to keep it, the next job measures for itself.
        with contextlib.suppress(StorageError):
            serial.write_atomic(path, serial.dumps(new))
        return new

    @staticmethod
    def kept(path: Path) -> Ladder | None:
        """Return what is kept in a file; nothing where that cannot be used."""
        with contextlib.suppress(StorageError, FormatError):
            kept = serial.from_json(Ladder, serial.read_json(path))
            kinds = (kept.whole, kept.part, kept.gathers, kept.flows, kept.begins)
            sizes = [tuple(rung.size_bytes for rung in rungs) for rungs in kinds]
            is_whole = sizes == [_SIZES_BYTES] * len(kinds)
            if is_whole and min(rung.time_s for rungs in kinds for rung in rungs) > 0.0:
                return kept
        return None

    def _lacks_moves(self, other: Ladder) -> bool:
        return self.moves_s_per_byte is None and other.moves_s_per_byte is not None

    def _is_like(self, other: Ladder) -> bool:
        """Return whether this one, which was kept, holds where the other was measured now."""
        ratios = (
            here[-1].time_s / there[-1].time_s
            for here, there in ((self.whole, other.whole), (self.part, other.part))
        )
        return all(1 / _BUSY < ratio < _FASTER for ratio in ratios)


def _measured(
    exchange: Exchange, act: Callable[[torch.Tensor], object], after: Callable[[], object] = bool
) -> tuple[Rung, ...]:
    """Return what an exchange takes of each size; ``after`` is done after each, and takes what it may."""
    rungs = []
    others = torch.ones(_OTHERS)
    for size_bytes in _SIZES_BYTES:
        values = torch.zeros(size_bytes // torch.float32.itemsize)
        times_s = _timed(exchange, act, after, values, others, _REPEATS)
        # All ranks have to make as many, and each has seconds of its own.
        total_s = torch.tensor([sum(times_s)])
        exchange.add(total_s)
        if float(total_s) < _SHORT_S * exchange.size:
            times_s += _timed(exchange, act, after, values, others, _MORE)
        rungs.append(Rung(size_bytes=size_bytes, time_s=sorted(times_s)[len(times_s) // 2]))
    return tuple(rungs)


def _shared(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Return what each of several exchanges took."""
    return tuple(Rung(size_bytes=r.size_bytes, time_s=r.time_s / _SEVERAL) for r in rungs)


def _timed(
    exchange: Exchange,
    act: Callable[[torch.Tensor], object],
    after: Callable[[], object],
    values: torch.Tensor,
    others: torch.Tensor,
    count: int,
) -> list[float]:
    times_s = []
    for _ in range(count):
        # As in a step: the values were made just now, and where they go others have been.
        others.mul_(1.0)
        values.add_(1.0)
        meet(exchange)
        begin_s = time.perf_counter()
        act(values)
        times_s.append(time.perf_counter() - begin_s)
        after()
    return times_s


def _lost_share(
    exchange: Exchange, ops: Ops, begin: Callable[[torch.Tensor], None], alone: Sequence[Rung]
) -> float:
    """Return the share of an exchange's time that ops lose, beside what it takes to begin it."""
    # What one rank took for long enough, others did not: all have to take the same size.
    total_s = torch.tensor([rung.time_s for rung in alone])
    exchange.add(total_s)
    short = [n for n, each_s in enumerate(total_s.tolist()) if each_s < _LONG_S * exchange.size]
    rung = alone[short[-1] if short else 0]
    values = torch.zeros(rung.size_bytes // torch.float32.itemsize)
    lost_s = lost_to_exchange_s(exchange, ops, partial(begin, values), rung.time_s)
    return min(lost_s / rung.time_s, 1.0)


def interpolated(rungs: Sequence[Rung], size_bytes: int) -> float:
    """Return the seconds at a size: between two rungs along the line, beyond the last in proportion to it."""
    first, last = rungs[0], rungs[-1]
    if size_bytes <= first.size_bytes:
        return first.time_s
    if size_bytes >= last.size_bytes:
        return last.time_s * size_bytes / last.size_bytes
    low, high = next(p for p in pairwise(rungs) if size_bytes <= p[1].size_bytes)
    share = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return low.time_s + (high.time_s - low.time_s) * share
