"""A drive that answers no more is a typed error where somebody has set a limit, and memory is its own until it does."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gascompile.core import patience
from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES, SPILL_BUFFER_BYTES
from gascompile.runtime.collectives.local_ranks import LocalRanks, Process, block_bytes
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.protocols import read_at
from tests.runtime.test_engine import Bench


class _Owner:
    """Of a limit of waits."""


@pytest.fixture
def impatient() -> Iterator[None]:
    """Give waits up after a moment, and let nothing of it stay."""
    owner = _Owner()
    patience.limit(owner, 0.3)
    yield
    patience.lift(owner)
    patience.arrived()


@pytest.mark.usefixtures("impatient")
def test_reads_that_hang_end_every_wait_for_them(tmp_path: Path) -> None:
    content = os.urandom(8 * PAGE_BYTES)
    (tmp_path / "w").write_bytes(content)
    answers = threading.Event()

    def hangs(descriptor: int, into: memoryview, offset: int) -> int:
        answers.wait()
        return read_at(descriptor, into, offset)

    bench = Bench([tmp_path / "w"], hangs, 2)
    ticket = bench.start(bench.landing((tmp_path / "w", 0, len(content))))
    for wait in (ticket.wait, bench.engine.drain, bench.engine.close):
        with pytest.raises(StorageError, match="a drive hangs or is gone"):
            wait()
    ended = [ticket.done]
    answers.set()
    # Once it answers, what was given up ends as if nothing had been.
    bench.engine.close()
    assert [*ended, ticket.done] == [False, True]
    bench.files.close()


@pytest.mark.usefixtures("impatient")
def test_slow_reads_are_waited_for(tmp_path: Path) -> None:
    content = os.urandom(8 * PAGE_BYTES)
    (tmp_path / "w").write_bytes(content)
    pause = threading.Event()

    def slow(descriptor: int, into: memoryview, offset: int) -> int:
        pause.wait(0.15)
        return read_at(descriptor, into, offset)

    # Four chunks, one after the other: together they take longer than the limit.
    bench = Bench([tmp_path / "w"], slow, 1)
    assert bench.read(bench.landing((tmp_path / "w", 0, len(content)))) == content
    bench.engine.close()
    bench.files.close()


@pytest.mark.usefixtures("impatient")
def test_writes_that_hang_end_every_wait_for_them(tmp_path: Path) -> None:
    answers = threading.Event()

    def hangs(descriptor: int, data: memoryview, offset: int) -> int:
        answers.wait()
        return os.pwrite(descriptor, data, offset)

    values = torch.arange(64, dtype=torch.uint8)
    buffers = memoryview(mmap.mmap(-1, 2 * SPILL_BUFFER_BYTES))
    spill = Spill(tmp_path, {"x": (0, 64)}, buffers, writer=hangs)
    ticket = spill.write("x", values.untyped_storage())
    for wait in (ticket.wait, spill.drain, spill.close):
        with pytest.raises(StorageError, match="a drive hangs or is gone"):
            wait()
    answers.set()
    spill.close()
    assert ticket.done
    assert not ticket.failed


@pytest.mark.usefixtures("impatient")
def test_a_rank_gives_its_own_part_of_a_weight_up() -> None:
    block = mmap.mmap(-1, block_bytes(2))
    ranks = LocalRanks(0, block, [Process.here(), Process.here()], [0, 1])
    with pytest.raises(StorageError, match="this rank's part of a weight"):
        ranks.wait(lambda: 0)
