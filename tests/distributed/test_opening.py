"""Ranks that are started again find each other, whatever those before them have left in the job's store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from gascompile.core.errors import RankError
from gascompile.distributed.opening import unused

SIZE = 3


def opened(store: Store) -> list[Store]:
    with ThreadPoolExecutor(SIZE) as ranks:
        limit = timedelta(seconds=20)
        return list(ranks.map(lambda rank: unused(store, rank, SIZE, limit), range(SIZE)))


def test_each_attempt_has_a_part_of_its_own() -> None:
    store = HashStore()
    for attempt in range(3):
        parts = opened(store)
        assert not parts[0].check(["address"]), "of an attempt before"
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * SIZE


def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    store = HashStore()
    opened(store)
    for rank in (0, 1):
        with pytest.raises(RankError, match="not all others have come"):
            unused(store, rank, SIZE, timedelta(seconds=0.2))
