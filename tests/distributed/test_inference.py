"""Ranks of a host that run a model on one copy of its weights, against eager; and how they part a load."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.sources import Extent, WeightSource
from gascompile.runtime.collectives.local_ranks import LocalRanks, Process, block_bytes
from gascompile.runtime.memory.shared_arena import SharedArena
from gascompile.runtime.transfer.read_plan import plan_landing
from gascompile.runtime.transfer.shared_engine import part_of
from tests.distributed.jobs import FilledOnce
from tests.distributed.test_ranks import left_by, run_job

KINDS = ("computes", "in training", "recovers", "differ", "ended")


@pytest.fixture(scope="module")
def two(filled_once: FilledOnce) -> Path:
    """What two ranks left; the last one ends itself in the end."""

    def fill(folder: Path) -> None:
        codes = run_job(folder, 2, *KINDS, worker="tests.distributed.inference_jobs")
        assert codes == [0, 3], [(folder / f"log-{r}").read_text()[-3000:] for r in range(2)]

    return filled_once("inference", fill)


@pytest.mark.parametrize("name", ["streamed", "resident", "own copies"])
def test_each_rank_computes_its_rows_on_one_copy(two: Path, name: str) -> None:
    found = [rank[name] for rank in left_by(two, 2, "computes")]
    assert [rank["equal"] for rank in found] == [[True] * 5] * 2
    assert [rank["moved"] > 0 for rank in found] == [name != "resident"] * 2
    # Each has its part of the memory that both have mapped.
    assert 0 < sum(rank["memory"] for rank in found) <= 1.1 * found[0]["arena"]


def test_closed_models_leave_no_memory(two: Path) -> None:
    assert [rank["left"] for rank in left_by(two, 2, "computes")] == [0, 0]


def test_buffers_that_calls_change_are_each_ranks_own(two: Path) -> None:
    first, second = left_by(two, 2, "in training")
    assert first["equal"] == second["equal"] == [True] * 4
    assert first["mean"] != second["mean"]


def test_what_fails_in_a_call_does_not_harm_the_next(two: Path) -> None:
    ranks = left_by(two, 2, "recovers")
    assert [rank["equal"] for rank in ranks] == [[True] * 6] * 2
    first, second = (rank["told"] for rank in ranks)
    for told in (first["rows"], second["rows"]):
        assert (told["error"], told["rank"]) == ("RankMismatchError", 1)
        assert "differ in the inputs of a call" in told["said"]
    for name, error in (("index", "IndexError"), ("interrupt", "KeyboardInterrupt")):
        assert second[name]["error"] == error
        assert (first[name]["error"], first[name]["rank"]) == ("RankError", 1)
        assert error in first[name]["said"]
    assert "rank 1 has closed the model" in first["closed"]["said"]


def test_what_is_not_the_same_on_all_ranks_is_refused(two: Path) -> None:
    ranks: list[dict[str, Any]] = left_by(two, 2, "differ")
    for told in ranks:
        assert told["content"]["error"] == told["model"]["error"] == "RankMismatchError"
        assert "the content of the weight files" in told["content"]["said"]
        assert "the model" in told["model"]["said"]
        assert told["auto"]["error"] == "UnsupportedOpError"
        assert told["alone"]["error"] == ""


def test_who_ends_is_named_at_once(two: Path) -> None:
    (told,) = left_by(two, 2, "ended", 0)
    assert (told["error"], told["rank"]) == ("RankError", 1)
    assert "rank 1 is gone" in told["said"]


def test_memory_that_a_rank_still_uses_is_not_freed() -> None:
    block, here = mmap.mmap(-1, block_bytes(2)), Process.here()
    ranks = [LocalRanks(rank, block, [here, here], [0, 1]) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:

        def opened() -> list[SharedArena]:
            return list(pool.map(lambda of: SharedArena(PAGE_BYTES, of), ranks))

        # The other rank fails before its session is whole, and never closes this one.
        opened()[1].close()
        first, second = opened()
    second.memory[:4] = b"here"
    first.close()
    assert bytes(second.memory[:4]) == b"here"
    second.close()
    assert bytes(first.memory[:4]) == bytes(4)


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3 << 20)), min_size=1, max_size=3),
    st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), min_size=1, max_size=4),
    st.integers(0, 7),
)
def test_parts_bring_every_byte_once(
    runs: list[tuple[int, int]], ranks: list[tuple[bool, int]], number: int
) -> None:
    extents, at = [], 0
    for gap, size in runs:
        extents.append(Extent(path="file", offset=at + gap, size_bytes=size))
        at += gap + size
    total = sum(size for _, size in runs)
    source = WeightSource(name="w", dtype="uint8", shape=(total,), extents=tuple(extents))
    parts, shifts = [], set()
    for rank, (is_direct, chunk_bytes) in enumerate(ranks):
        # Whether a rank's file system has direct reads may differ; then where the tensor begins must not.
        direct = frozenset({"file"} if is_direct else ())
        landing = plan_landing(source, chunk_bytes=chunk_bytes, is_direct=direct.__contains__)
        shifts.add(landing.shift_bytes)
        parts.append(part_of(landing, rank, len(ranks), number))
    if len(shifts) > 1:
        return
    (shift,) = shifts
    count = bytearray(total)
    for part in parts:
        for piece in part.pieces:
            assert not piece.direct or not (piece.offset | piece.position | piece.size_bytes) % 4096
            begin, end = piece.position - shift, piece.position - shift + piece.needed_bytes
            count[max(begin, 0) : end] = bytes(value + 1 for value in count[max(begin, 0) : end])
    assert set(count) <= {1}
