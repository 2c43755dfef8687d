"""One rank of three, whose values go over Gloo as those of ranks on hosts of their own do; writes what came of it.

Run as ``tests.distributed.forked_ranks`` runs workers.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gascompile.core.errors import RankError
from gascompile.distributed.opening import open_default_group
from gascompile.runtime.collectives.exchange import Exchange
from gascompile.runtime.collectives.trades import Trades

SIZE, NUM_ROUNDS, GONE = 3, 40, 2
_MOST = 400_000
"""Elements of a part: more than a socket holds."""
_ABSENT_S = 4.0
"""Before the last rank ends, which takes part in nothing meanwhile."""


def values_of(number: int, rank: int, count: int) -> torch.Tensor:
    """Return what a rank has in a round: whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-9, 9, (count,), generator=generator).float()


def _drawn(chance: random.Random) -> list[int]:
    return [
        chance.choice((0, 1, chance.randrange(2000), chance.randrange(_MOST))) for _ in range(SIZE)
    ]


def _exchanged(exchange: Exchange) -> tuple[int, int]:
    """Exchange the same things as all ranks; return how many there were, and how many were right."""
    chance, count, right = random.Random(7), 0, 0
    for number in range(NUM_ROUNDS):
        several = [_drawn(chance) for _ in range(chance.randrange(1, 5))]
        gathers = [chance.random() < 0.5 for _ in several]
        if chance.random() < 0.3:
            time.sleep(0.01 * random.Random(number * SIZE + exchange.rank).random())
        rank = exchange.rank
        count += len(several)
        mine = [values_of(number, rank, sum(sizes)) for sizes in several]
        for values, sizes, is_gather in zip(mine, several, gathers, strict=True):
            if is_gather:
                exchange.begin_gather(values, sizes)
            else:
                exchange.begin_part(values, sizes)
        for values, sizes, is_gather in zip(mine, several, gathers, strict=True):
            all_of = [values_of(number, r, sum(sizes)).split(sizes) for r in range(SIZE)]
            if is_gather:
                exchange.end_gather(values)
                right += torch.equal(values, torch.cat([all_of[r][r] for r in range(SIZE)]))
            else:
                summed = sum(all_of[r][rank] for r in range(SIZE))
                right += torch.equal(exchange.end_part(), summed)
    return count, right


def _traded(group: dist.ProcessGroup, rank: int) -> int:
    """Trade parts of any size for parts of any other; return how many trades were right."""
    trades, chance, right = Trades(group), random.Random(3), 0
    for number in range(NUM_ROUNDS):
        table = [_drawn(chance) for _ in range(SIZE)]  # of whom, to whom
        received = torch.full((sum(row[rank] for row in table),), -77.0)
        mine = values_of(number, rank, sum(table[rank]))
        begun = trades.begin(received, mine, [row[rank] for row in table], table[rank])
        assert begun.ends(lambda _: True)
        all_of = [values_of(number, r, sum(table[r])).split(table[r]) for r in range(SIZE)]
        right += torch.equal(received, torch.cat([all_of[r][rank] for r in range(SIZE)]))
    trades.leave()
    return right


def _said(exchange: Exchange, is_broken: Callable[[], bool]) -> str:
    """Wait for values that one rank does not send; return what is said, and whether something is still under way."""
    exchange.is_broken = is_broken
    try:
        exchange.add_part(torch.ones(SIZE * _MOST), [_MOST] * SIZE)
    except RankError as error:
        return f"{error}; hung: {exchange.is_hung}"
    return "nothing"


def _why(error: BaseException) -> RankError:
    return RankError(str(error))


def main() -> None:
    """Exchange, and write what came of it into the folder that is named first."""
    torch.set_num_threads(1)
    open_default_group()
    group = dist.group.WORLD
    assert group is not None, "it was opened"
    own = dist.new_group(list(range(SIZE)), backend="gloo")
    exchange = Exchange(group, why=_why)
    begun, exchanged = _exchanged(exchange)
    found: dict[str, int | str] = {
        "begun": begun,
        "exchanged": exchanged,
        "traded": _traded(own, exchange.rank),
    }
    dist.barrier()
    if exchange.rank == GONE:
        time.sleep(_ABSENT_S)
    else:
        found["given up"] = _said(Exchange(own, why=_why), lambda: True)
        found["broken"] = _said(exchange, bool)
    torch.save(found, Path(sys.argv[1]) / f"trades.{exchange.rank}-of-{SIZE}.pt")
    os._exit(0)


if __name__ == "__main__":
    main()
