"""Exchanges by reading each other's memory: what comes of them, and how they end where a rank does not go on.

Ranks are threads of this process, whose memory they read as they would another's.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gascompile.core.errors import RankError
from gascompile.runtime.collectives import exchange, peer_memory
from gascompile.runtime.collectives.exchange import Exchange
from gascompile.runtime.collectives.peer_memory import PeerMemory, Want

_LIMIT_S = 60.0


def _broken(error: BaseException) -> RankError:
    return RankError(str(error), rank=0)


class Host:
    """Ranks of one host that tell each other what ``meet`` asks for."""

    def __init__(self, size: int) -> None:
        self.size, self.told = size, dict[str, list[str]]()
        self._barrier = threading.Barrier(size)

    def end(self, rank: int) -> Exchange:
        end = Exchange.__new__(Exchange)
        end.rank, end.size, end.silent_s, end.time_s = rank, self.size, _LIMIT_S, 0.0
        end._why, end._begun, end._memory, end.is_broken = _broken, deque(), None, bool

        def gather(topic: str, said: str) -> list[str]:
            self.told.setdefault(topic, [""] * self.size)[rank] = said
            self._barrier.wait(_LIMIT_S)
            return self.told[topic]

        end.meet(gather)
        end._barrier = self._barrier  # type: ignore[attr-defined]
        return end

    def run(self, act: Callable[[Exchange], Any]) -> list[Any]:
        """Return what each rank does, all at once."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: act(self.end(rank)), range(self.size)))


def values_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [1, 40, 50_000])
def test_ranks_have_the_sums_in_their_order(size: int, count: int) -> None:
    sizes = [count - count // 3 * (size - 1), *[count // 3] * (size - 1)]

    def act(end: Exchange) -> list[torch.Tensor]:
        assert end.reads
        whole, values = values_of(end.rank, count), values_of(end.rank, count)
        end.add(whole)
        part = end.add_part(values, sizes)
        # Two sums and a gather are under way at once, of memory that the exchange alone still has.
        end.begin_part(values.clone(), sizes)
        moving = torch.full((count,), float(end.rank))
        end.begin_gather(moving, sizes)
        end.begin_part(values.clone(), sizes)
        late = [end.end_part()]
        moving.split(sizes)[end.rank].add_(0.5)
        end.end_gather(moving)
        late.append(end.end_part())
        gathered = torch.empty(count)
        end.gather(gathered, sizes, part)
        return [whole, gathered, moving, torch.cat([part, *late])]

    found = Host(size).run(act)
    wanted = reduce(torch.add, [values_of(rank, count) for rank in range(size)])
    for rank, (whole, gathered, moving, parts) in enumerate(found):
        assert torch.equal(whole, wanted)
        assert torch.equal(gathered, wanted)
        assert torch.equal(parts, wanted.split(sizes)[rank].repeat(3))
        own = torch.arange(size).repeat_interleave(torch.tensor(sizes)).float()
        own.split(sizes)[rank].add_(0.5)
        assert torch.equal(moving, own)


def test_more_exchanges_than_slots_are_under_way() -> None:
    def act(end: Exchange) -> list[torch.Tensor]:
        for number in range(150):
            end.begin_part(torch.full((2,), float(number)), [1, 1])
        return [end.end_part() for _ in range(150)]

    for found in Host(2).run(act):
        assert torch.cat(found).tolist() == [2.0 * number for number in range(150)]


def drawn(chance: random.Random, size: int, count: int) -> list[tuple[str, list[int]]]:
    """Return exchanges that all ranks make, with the elements of each rank's part, of which some have none."""
    asked = []
    for _ in range(count):
        total = chance.choice((0, 1, 7, 1000, 40_000))
        cuts = sorted(chance.randint(0, total) for _ in range(size - 1))
        sizes = [end - begin for begin, end in pairwise([0, *cuts, total])]
        kind = chance.choice(("add", "part", "gather", "begin part", "begin gather", "end", "end"))
        asked.append((kind, sizes))
    return asked


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_come_at_any_time_read_what_was_offered(seed: int) -> None:
    """What an exchange is done with is spoilt at once, by ranks of which now one and now another is late."""
    size = 2 + seed % 3
    asked = drawn(random.Random(seed), size, 120)

    def values(number: int, rank: int) -> torch.Tensor:
        return values_of(1000 * seed + 8 * number + rank, sum(asked[number][1]))

    def summed(number: int) -> torch.Tensor:
        return reduce(torch.add, [values(number, rank) for rank in range(size)])

    def gathered(number: int) -> torch.Tensor:
        sizes = asked[number][1]
        return torch.cat([values(number, rank).split(sizes)[rank] for rank in range(size)])

    def act(end: Exchange) -> None:
        late, rank, nan = random.Random(seed + 50 * end.rank), end.rank, float("nan")
        begun: deque[tuple[int, torch.Tensor, bool]] = deque()

        def ends() -> None:
            number, own, sums = begun.popleft()
            sizes = asked[number][1]
            if sums:
                found, wanted = end.end_part(), summed(number).split(sizes)[rank]
            else:
                end.end_gather(own)
                found, wanted = own, gathered(number)
                wanted.split(sizes)[rank].fill_(-1.0)
            assert torch.equal(found, wanted), (number, asked[number])
            own.fill_(nan)
            found.fill_(nan)

        for number, (kind, sizes) in enumerate(asked):
            if late.random() < 0.2:
                time.sleep(late.random() * 4e-3)
            own = values(number, rank)
            part = own.split(sizes)[rank].clone()
            if kind == "add":
                end.add(own)
                assert torch.equal(own, summed(number))
            elif kind == "part":
                assert torch.equal(end.add_part(own, sizes), summed(number).split(sizes)[rank])
            elif kind == "gather":
                whole = torch.full_like(own, nan)
                end.gather(whole, sizes, part)
                assert torch.equal(whole, gathered(number))
                whole.fill_(nan)
            elif kind == "begin part":
                end.begin_part(own, sizes)
                begun.append((number, own, True))
                continue  # nobody else may have what was given
            elif kind == "begin gather":
                end.begin_gather(own, sizes)
                # It may move, or be written to, meanwhile.
                own.fill_(nan)
                own.split(sizes)[rank].fill_(-1.0)
                begun.append((number, own, False))
                continue
            elif begun:
                ends()
            own.fill_(nan)
            part.fill_(nan)
        while begun:
            ends()

    Host(size).run(act)


def test_counts_of_exchanges_begin_anew() -> None:
    """After 2^32 exchanges, here in the middle of more than there are slots for."""

    def act(end: Exchange) -> list[torch.Tensor]:
        words = end._memory._words  # type: ignore[union-attr]
        words[1] = words[2] = peer_memory._in_both_halves((1 << 32) - 70)
        end._barrier.wait(_LIMIT_S)  # type: ignore[attr-defined]
        for number in range(150):
            end.begin_part(torch.full((2,), float(number)), [1, 1])
        parts = [end.end_part() for _ in range(150)]
        assert words[1] == words[2] == peer_memory._in_both_halves(80)
        return parts

    for found in Host(2).run(act):
        assert torch.cat(found).tolist() == [2.0 * number for number in range(150)]


def test_what_is_copied_meanwhile_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PeerMemory(0), PeerMemory(1)
    told = [first.told(), second.told()]
    assert first.finds(told)
    assert second.finds(told)
    clock, values, taken = [0.0], torch.arange(8.0), torch.zeros(8)
    read = peer_memory._read

    def copied(pid: int, address: int, into: int, size_bytes: int) -> None:
        if address == values.data_ptr():
            clock[0] += 5.0
        read(pid, address, into, size_bytes)

    def slept(_: float) -> None:
        clock[0] += 3.0
        second.offer(values, [], bool)

    of_own = SimpleNamespace(monotonic=lambda: clock[0], sleep=slept)
    monkeypatch.setattr(peer_memory, "_read", copied)
    monkeypatch.setattr(peer_memory, "time", of_own)
    first.take(first.offer(values, [Want(1, values.nbytes, 0, taken)], bool), lambda _: True)
    assert torch.equal(taken, values)
    assert clock == [8.0]
    assert first.waited_s == 3.0


def test_a_rank_that_leaves_or_offers_something_else_breaks_the_exchange() -> None:
    def leaves(end: Exchange) -> None:
        end.add(torch.zeros(3))
        if end.rank:
            end._memory.leave()  # type: ignore[union-attr]
            return
        with pytest.raises(RankError, match="left the exchange"):
            end.add_part(torch.zeros(4), [2, 2])

    def differs(end: Exchange) -> str:
        with pytest.raises(RankError) as caught:
            end.add_part(torch.zeros(4 if end.rank else 8), [2, 2] if end.rank else [4, 4])
        return str(caught.value)

    kept = len(exchange._kept)
    Host(2).run(leaves)
    assert any("of another exchange" in said for said in Host(2).run(differs))
    # Others may read, and nothing may be written over, what a broken exchange had.
    assert len(exchange._kept) > kept
    del exchange._kept[kept:]


def test_a_count_that_is_read_while_it_changes_is_read_again() -> None:
    first, second = PeerMemory(0), PeerMemory(1)
    told = [first.told(), second.told()]
    assert first.finds(told)
    assert second.finds(told)
    values, taken = torch.arange(8.0), torch.zeros(8)
    second.offer(values, [], bool)
    offered = second._words[1]
    second._words[1] = offered & 0xFFFFFFFF  # as where half of a word were there
    after = threading.Timer(0.05, second._words.__setitem__, (1, offered))
    after.start()
    reading = first.offer(values, [Want(1, values.nbytes, 0, taken)], bool)
    assert second._words[1] == offered, "nothing was taken before"
    first.take(reading, bool)
    after.join()
    assert torch.equal(taken, values)


def test_nothing_is_waited_for_beyond_the_limit() -> None:
    def act(end: Exchange) -> None:
        if end.rank == 0:
            end.is_broken = lambda: True
            with pytest.raises(RankError, match="nothing comes"):
                end.add(torch.zeros(3))

    Host(2).run(act)


def test_a_process_that_is_gone_is_found() -> None:
    code = (
        "import sys, os; sys.path.insert(0, os.getcwd());"
        "from gascompile.runtime.collectives.peer_memory import PeerMemory;"
        "print(PeerMemory(1).told(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as end:
        assert end.stdout is not None
        other = end.stdout.readline().strip()
        own, idle = PeerMemory(0), PeerMemory(0)
        told = [own.told(), other]
        assert own.finds(told)
        assert idle.finds([idle.told(), other])
        end.kill()
    # Who is gone needs nothing any more: this rank's memory is free.
    idle.finish(idle.offer(torch.zeros(2), [], lambda _: False), lambda _: False)
    with pytest.raises(RuntimeError, match="cannot be read"):
        own.offer(torch.zeros(2), [Want(1, 8, 0, torch.zeros(2))], lambda _: True)
    assert not PeerMemory(0).finds(told)


def test_ranks_elsewhere_are_not_read() -> None:
    own, other = PeerMemory(0), PeerMemory(1)
    told = [own.told(), other.told()]
    assert own.finds(told)
    pid, board, token, host = told[1].split(" ", 3)
    for words in (
        f"{pid} {board} {token} elsewhere/x86_64",
        f"{pid} {board} {int(token) + 1} {host}",
        f"{pid} 8 {token} {host}",
        f"{os.getppid()} {board} {token} {host}",
    ):
        assert not PeerMemory(0).finds([told[0], words])
