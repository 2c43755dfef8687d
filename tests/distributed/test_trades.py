"""Exchanges of ranks that do not read each other's memory, over Gloo, beside sums that each computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gascompile.runtime.collectives import trades
from tests.distributed.jobs import FilledOnce
from tests.distributed.test_ranks import left_by, run_forked_job
from tests.distributed.trades_worker import GONE, NUM_ROUNDS, SIZE


@pytest.fixture(scope="module")
def left(filled_once: FilledOnce) -> list[dict[str, Any]]:
    def fill(folder: Path) -> None:
        codes = run_forked_job(folder, SIZE, worker="tests.distributed.trades_worker")
        assert codes == [0] * SIZE, [(folder / f"log-{r}").read_text()[-3000:] for r in range(SIZE)]

    return left_by(filled_once("trades", fill), SIZE, "trades")


def test_sums_and_gathers_under_way_at_once_are_those_of_all_ranks(
    left: list[dict[str, Any]],
) -> None:
    begun = left[0]["begun"]
    assert begun > NUM_ROUNDS
    assert [(rank["exchanged"], rank["begun"]) for rank in left] == [(begun, begun)] * SIZE


def test_each_rank_gets_of_each_what_that_has_for_it(left: list[dict[str, Any]]) -> None:
    assert [rank["traded"] for rank in left] == [NUM_ROUNDS] * SIZE


def test_a_rank_that_does_not_come_is_given_up_and_one_that_ends_breaks_it(
    left: list[dict[str, Any]],
) -> None:
    for rank in range(SIZE):
        if rank != GONE:
            assert left[rank]["given up"].endswith("a rank is gone; hung: True")
            assert left[rank]["broken"].endswith("hung: False")
            assert "nothing" not in left[rank]["broken"]


def test_ranks_are_ready_to_receive_before_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo says so behind what is sent before, and a network would be used one way at a time."""
    asked: list[tuple[str, int, int]] = []

    class Work:
        def wait(self) -> None:
            """End at once."""

    def irecv(tensor: torch.Tensor, **how: Any) -> Work:
        asked.append(("receive", how["group_src"], tensor.numel()))
        return Work()

    def isend(tensor: torch.Tensor, **how: Any) -> Work:
        asked.append(("send", how["group_dst"], tensor.numel()))
        return Work()

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 4)
    own = trades.Trades(object())  # type: ignore[arg-type]
    received, sent = torch.zeros(9), torch.arange(10.0)
    assert own.begin(received, sent, [4, 2, 0, 3], [1, 2, 7, 0]).ends(lambda _: True)
    assert asked == [("receive", 3, 3), ("receive", 0, 4), ("send", 2, 7), ("send", 0, 1)]
    assert received.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0]
    own.leave()
    with pytest.raises(RuntimeError, match="has left"):
        own.begin(received, sent, [4, 2, 0, 3], [1, 2, 7, 0])
