"""Ranks of a job: found from the environment that ``torchrun`` sets, or a mesh; what they check before each step.

A rank that fails says why in the job's store and leaves its groups, so that no other waits for it: their exchange
breaks, they find the reason, and raise it by its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from gascompile.core import patience
from gascompile.core.errors import NanLossError, RankError, RankMismatchError
from gascompile.core.ranks import MeshLayout, RankLayout
from gascompile.distributed.answering_store import AnsweringStore
from gascompile.distributed.ladder import Ladder
from gascompile.distributed.own_moves import OwnMoves
from gascompile.distributed.reasons import first_line, heard, is_of_others, told
from gascompile.distributed.votes import Votes
from gascompile.runtime.collectives.exchange import Exchange
from gascompile.runtime.collectives.group_work import ends

SILENT_S = 20.0
"""A rank from which nothing comes for so long, and three of its predicted steps more, is given up. Half a minute for
short steps: ranks wait for each other only while all are in the middle of one."""
_OWN_S = 15.0
"""As ``SILENT_S``, for a rank's own drives: sooner, so that the others hear of it."""
_MEET = timedelta(minutes=30)
"""How long ranks wait for each other between steps, where one may load data or evaluate; torch's own default."""
_REASON_S = 2.0
"""A rank that fails writes its reason before it leaves; one that was killed never does."""
_WORDS, _MOST_NUMBERS = 4, 10
_jobs = iter(range(1 << 62))


@dataclass(slots=True)
class _Groups:
    """What steps over the same members share."""

    base: dist.ProcessGroup
    meeting: dist.ProcessGroup
    work: dist.ProcessGroup
    across: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    """Of the ranks with the same stage, where pipelines are beside each other; by the number of stages."""
    ladder: Ladder | None = None
    users: WeakSet[Ranks] = field(default_factory=WeakSet)


_open: dict[tuple[int, ...], _Groups] = {}
"""By members: kept for the next step, as a group that is opened again under the name of one that is gone may find the
old addresses."""


class Ranks:
    """This process among the ranks that train one model; every rank makes its own at the same time."""

    def __init__(self, base: dist.ProcessGroup, num_stages: int = 1) -> None:
        """Open own groups over the ranks of ``base``, of which each ``num_stages`` that follow make a pipeline."""
        members = dist.get_process_group_ranks(base)
        self.layout = RankLayout(rank=dist.get_rank(base), size=len(members))
        self.mesh = MeshLayout.of(self.layout, num_stages)
        self._members, self._job = tuple(members), next(_jobs)
        open_group = partial(dist.new_group, timeout=_MEET, backend="gloo")
        if self._members not in _open or _open[self._members].base is not base:
            # A part of the job opens its groups without the other ranks.
            alone = len(members) < dist.get_world_size()
            opened = [open_group(members, use_local_synchronization=alone) for _ in range(2)]
            _open[self._members] = _Groups(base, *opened)
        prefix = f"gascompile/{members[0]}/{self._job}"
        store = c10d.PrefixStore(prefix, c10d._get_default_store())
        self._meeting: dist.ProcessGroup | None
        self._group: dist.ProcessGroup | None
        groups = _open[self._members]
        self._meeting, self._group = groups.meeting, groups.work
        groups.users.add(self)
        self._failure: RankError | None = None
        self.num_compared = 0
        """Meetings of all ranks so far."""
        self._own_s = _OWN_S
        self._common: BaseException | None = None
        """What this rank has raised last that all ranks know of, and that breaks nothing."""
        self._known: WeakSet[Exception] = WeakSet()
        self.exchange = self._made(self._group)
        if 1 < num_stages < self.layout.size:
            self.exchange.first_peer = self.mesh.first
            if num_stages not in groups.across:
                peers = [members[rank] for rank in self.mesh.peers]
                groups.across[num_stages] = open_group(peers, use_local_synchronization=True)
            self.exchange.across = self._made(groups.across[num_stages])
        store.set(f"host/{self.layout.rank}", f"{socket.gethostname()} {os.getpid()}")
        # Now, as the store goes with the rank that keeps it.
        hosts = [store.get(f"host/{rank}").decode() for rank in range(len(members))]
        self._store = AnsweringStore(store)
        self._processes = [host.rpartition(" ")[::2] for host in hosts]
        self.votes = Votes(self._store, self.layout, _MEET.total_seconds(), self._broken_by)
        """What ranks tell each other beside the steps."""
        self._meet(self.exchange, range(len(members)))
        if self.exchange.across is not None:
            self._meet(self.exchange.across, self.mesh.peers)

    def _meet(self, exchange: Exchange, peers: Sequence[int]) -> None:
        """Let ranks that run on one host exchange values by reading each other's memory."""
        call = self.votes.call()

        def gather(topic: str, said: str) -> list[str]:
            told = self.votes.gather(f"memory/{call}/{topic}", said)
            return [told[rank] for rank in peers]

        exchange.meet(gather)

    def _made(self, group: dist.ProcessGroup) -> Exchange:
        """Return this rank's end of the exchanges of a group."""
        made = Exchange(group, why=self._reason)
        made.is_broken = lambda: self._gone() >= 0 or self._said() is not None
        return made

    @property
    def hosts(self) -> list[str]:
        """The hosts of the ranks, in their order."""
        return [host for host, _ in self._processes]

    @property
    def processes(self) -> list[int]:
        """The numbers of the ranks' processes on this host."""
        return [int(pid) for host, pid in self._processes if host == socket.gethostname()]

    def ladder(self, moves: OwnMoves | None = None) -> Ladder:
        """Return what exchanges take; all ranks measure it at once, unless they have. See ``Ladder.measured``."""
        groups = _open[self._members]
        known = groups.ladder
        if known is None or (moves is not None and known.moves_s_per_byte is None):
            groups.ladder = known = Ladder.measured(self.exchange, moves)
        return known

    def compare(self, what: str, facts: bytes, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Return each rank's ``numbers``, once all ranks are here with the same facts.

        Args:
            what: the facts are of, for messages.
            facts: any bytes; equal on all ranks.
            numbers: of this rank, ten at most.

        Raises:
            RankError: a rank has failed.
            RankMismatchError: they differ, on every rank.
        """
        if self._failure is not None:
            raise self._failure
        if self._meeting is None:
            raise RankError(f"rank {self.layout.rank} has left the others", rank=self.layout.rank)
        self.num_compared += 1
        heading = f"{self._job} {what} {len(numbers)} "
        digest = hashlib.sha256(heading.encode() + facts).digest()
        words = [
            int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_WORDS)
        ]
        # Always as long: a rank that calls something else is to be found, not to break the exchange.
        padded = [*numbers, *[0] * (_MOST_NUMBERS - len(numbers))]
        own = torch.tensor([*words, *padded], dtype=torch.int64)
        rows = torch.empty(self.layout.size, len(own), dtype=torch.int64)
        try:
            work = dist.all_gather(list(rows.unbind()), own, group=self._meeting, async_op=True)
            self._wait(work)
        except RuntimeError as error:
            raise self._reason(error) from error
        table = rows.tolist()
        others = [rank for rank, row in enumerate(table) if row[:_WORDS] != table[0][:_WORDS]]
        if others and (failed := self._said() or self._refused()) is not None:
            raise failed
        if others:
            raise RankMismatchError(
                f"rank {', '.join(map(str, others))} and rank 0 differ in {what}, where rank {self.layout.rank} is: "
                "every rank has to make the same model, optimizer and calls in the same order; only the batches are "
                "its own",
                rank=others[0],
            )
        return [row[_WORDS : _WORDS + len(numbers)] for row in table]

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank cannot do what all are about to: they raise that, and all may go on.

        Nothing may have changed yet. Where all ranks refuse, each has its own reason.

        Raises:
            RankError: a rank has failed.
        """
        if self._group is None or self._failure is not None:
            return
        said = f"{type(error).__name__}: {error}"
        key = f"refused/{self.num_compared + 1}/{self.layout.rank}"
        with contextlib.suppress(RuntimeError):
            self._store.set(key, said)
        with contextlib.suppress(RankMismatchError):
            self.compare("what a rank refuses", b"")
        self._common = error

    def _refused(self) -> RankMismatchError | None:
        """Return what a rank refuses to do that the others were about to, if one does."""
        for rank in range(self.layout.size):
            key = f"refused/{self.num_compared}/{rank}"
            with contextlib.suppress(RuntimeError):
                if rank != self.layout.rank and self._store.check([key]):
                    return RankMismatchError(
                        f"rank {rank} cannot do what all are about to: {self._store.get(key).decode()}. Nothing has "
                        "changed on any rank; call again with what all of them can do",
                        rank=rank,
                    )
        return None

    def _wait(self, work: dist.Work) -> None:
        """Wait for a meeting, as long as the other ranks of this host run: one may load data for long.

        Raises:
            RuntimeError: one is gone or stopped.
        """
        limit_s = _MEET.total_seconds()
        if not ends(work, lambda s: s < limit_s and self._gone() < 0 and self._said() is None):
            self.exchange.is_hung = True
            raise RuntimeError("nothing comes any more")

    def _broken_by(self, error: BaseException | None) -> RankError | None:
        """Return why a vote comes to nothing: what ``error`` broke it by, or what is known of the ranks by now."""
        if self._failure is not None:
            return self._failure
        if error is not None:
            return self._reason(error)
        failed = self._said()
        if failed is not None or self._gone() < 0:
            return failed
        return self._reason(RuntimeError("it votes no more"))

    def known(self, error: Exception) -> Exception:
        """Return an error that all ranks raise by now, and after which all may go on."""
        self._known.add(error)
        return error

    def _gone(self) -> int:
        """Return a rank of this host that does not run any more, or -1."""
        others = (rank for rank in range(self.layout.size) if rank != self.layout.rank)
        return next((rank for rank in others if self._is_gone(rank)), -1)

    def send(self, tensors: Sequence[torch.Tensor], rank: int = 0) -> None:
        """Give all ranks the values of one.

        Raises:
            RankError: a rank has failed.
        """
        for tensor in tensors:
            try:
                work = dist.broadcast(tensor, group_src=rank, group=self._meeting, async_op=True)
                self._wait(work)
            except RuntimeError as error:
                raise self._reason(error) from error

    def trade(
        self, sent: torch.Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank its part of a vector; return what comes from each, one after the other.

        Raises:
            RankError: a rank has failed.
        """
        received = sent.new_empty(sum(received_sizes))
        sizes = (list(received_sizes), list(sent_sizes))
        how: dict[str, Any] = {"group": self._meeting, "async_op": True}
        try:
            self._wait(dist.all_to_all_single(received, sent, *sizes, **how))
        except RuntimeError as error:
            raise self._reason(error) from error
        return received

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Return the bytes that each rank has; all ranks call it.

        Raises:
            RankError: a rank does something else, or has failed.
        """
        sizes = [row[0] for row in self.compare(what, b"", [len(data)])]
        own = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        received = self.trade(own.repeat(len(sizes)), [len(data)] * len(sizes), sizes)
        return [part.numpy().tobytes() for part in received.split(sizes)]

    def expect(self, time_s: float) -> None:
        """Give a rank, or its drives, up that are silent for too long in a step; ``time_s`` is what one takes."""
        self.exchange.silent_s = SILENT_S + 3 * time_s
        if self.exchange.across is not None:
            self.exchange.across.silent_s = self.exchange.silent_s
        self._own_s = _OWN_S + 3 * time_s

    @contextlib.contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Give this rank's drives up that are silent within: all ranks wait for it then, and not elsewhere."""
        patience.limit(self, self._own_s)
        try:
            yield
        finally:
            patience.lift(self)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Tell the other ranks if what is done within fails here; what all ranks find at once breaks nothing."""
        try:
            yield
        except BaseException as error:
            # Of the loss over all rows, or of what was compared: every rank has found it.
            is_common = isinstance(error, RankMismatchError) or error is self._common
            is_common = is_common or any(error is known for known in self._known)
            if not is_common and not (isinstance(error, NanLossError) and not error.op):
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Let all other ranks end, with this reason; idempotent."""
        if self._group is None:
            return
        own, said = self.layout.rank, told(error)
        # One rank finds at once what others would wait for.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failed/{own}", said)
        self._failure = error if isinstance(error, RankError) else heard(own, said)
        groups = _open.get(self._members)
        if groups is not None and groups.work is self._group:
            del _open[self._members]
        across = self.exchange.across
        is_hung = self.exchange.is_hung or (across is not None and across.is_hung)
        of_peers = list(groups.across.values()) if groups is not None else []
        for group in (self._group, self._meeting, *of_peers):
            if is_hung:
                # The end of a group waits for its exchanges, with all of Python: it lasts as long as the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                continue
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)
        # Other steps over the same ranks would go on alone.
        for user in list(groups.users) if groups is not None else [self]:
            user._failure = self._failure
            user.close()
        self.close()

    def close(self) -> None:
        """Hold the groups no longer; idempotent."""
        self._group = self._meeting = None
        self.exchange.leave()

    def _reason(self, error: BaseException) -> RankError:
        """Return why an exchange broke: what a rank has said, or which one is gone."""
        until_s = time.monotonic() + _REASON_S
        while time.monotonic() < until_s:
            if (failed := self._said()) is not None:
                return failed
            time.sleep(0.02)
        gone = self._gone()
        who = f"rank {gone} is gone or stopped" if gone >= 0 else "a rank is gone, silent or hung"
        return RankError(
            f"{who}: this is rank {self.layout.rank} of {self.layout.size}, and the exchange with the others broke "
            f"({first_line(error)}). Start the job again from its last checkpoint; torchrun --max-restarts does so",
            rank=gone,
        )

    def _said(self) -> RankError | None:
        """Return what a rank that has failed said, if one has; else what one has found of others."""
        found = []
        for rank in range(self.layout.size):
            # The store goes with the rank that keeps it.
            with contextlib.suppress(RuntimeError):
                if rank != self.layout.rank and self._store.check([f"failed/{rank}"]):
                    said = self._store.get(f"failed/{rank}").decode()
                    found.append((is_of_others(said), heard(rank, said)))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank of this host is no process any more, or a stopped one."""
        host, pid = self._processes[rank]
        if host != socket.gethostname():
            return False
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] in "TZ"
        except OSError:
            return True
