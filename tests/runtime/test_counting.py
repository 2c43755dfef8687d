"""Runs are charged with what torch's allocator hands out to them, and refused what is beyond their limit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.codegen.allocator_library import allocation_counter
from gascompile.codegen.build import has_compiler
from gascompile.runtime.memory.counting import Counter
from tests.allocator import peak_growth_bytes

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")


MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Counter:
    """Return the counter that all tests of a process share."""
    found = allocation_counter(tmp_path_factory.mktemp("counting"))
    assert found is not None
    return found


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


@given(
    sizes=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=60),
    choices=st.randoms(use_true_random=False),
)
def test_live_and_peak_bytes_are_those_of_the_blocks(
    counter: Counter, sizes: list[int], choices: random.Random
) -> None:
    alive: list[torch.Tensor] = []
    live = peak = 0
    with counter.counting() as count:
        for size in sizes:
            alive.append(block(size))
            live += size
            peak = max(peak, live)
            assert count.live_bytes == live
            while alive and choices.random() < 0.5:
                live -= alive.pop(choices.randrange(len(alive))).nbytes
        assert (count.live_bytes, count.peak_bytes) == (live, peak)
    assert (count.live_bytes, count.peak_bytes) == (live, peak)


def test_many_blocks_are_all_found_again(counter: Counter) -> None:
    order = random.Random(0)
    with counter.counting() as count:
        alive = {i: block(1 + i % 7) for i in range(20_000)}
        assert count.live_bytes == sum(x.nbytes for x in alive.values())
        for i in order.sample(sorted(alive), 15_000):
            del alive[i]
        assert count.live_bytes == sum(x.nbytes for x in alive.values())
        alive.clear()
        assert count.live_bytes == 0


def test_ops_count_as_torch_records_them(counter: Counter) -> None:
    x, y = torch.randn(50, 64), torch.randn(64, 128)[:, ::2]

    def call() -> torch.Tensor:
        return torch.softmax((x @ y).sort().values, -1).cumsum(0)

    with counter.counting() as count:
        call()
    assert count.peak_bytes == peak_growth_bytes(call)


def test_what_is_beyond_the_limit_is_refused_and_not_taken(counter: Counter) -> None:
    with counter.counting(live_bytes=1000, limit_bytes=5000) as count:
        kept = block(4000)
        with pytest.raises(torch.OutOfMemoryError, match="0 bytes for a block of 1"):
            block(1)
        assert (count.live_bytes, count.peak_bytes, count.wanted_bytes) == (5000, 5000, 5001)
        del kept
        block(4000)
    block(1 << 20)


def test_blocks_of_an_earlier_run_are_nothing_to_the_next(counter: Counter) -> None:
    with counter.counting() as first:
        kept = block(1000)
    with counter.counting() as second:
        assert second.size_of(kept.data_ptr()) == 0
        del kept
        assert second.live_bytes == 0
        own = block(10)
        assert second.size_of(own.data_ptr()) == 10
    assert first.live_bytes == 1000


def test_frees_by_other_threads_count_and_their_blocks_do_not(counter: Counter) -> None:
    with counter.counting() as count:
        given = [block(1000)]
        taken: list[torch.Tensor] = []

        def other() -> None:
            given.clear()
            taken.append(block(500))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert (count.live_bytes, count.peak_bytes) == (0, 1000)
        taken.clear()
        assert count.live_bytes == 0


def test_two_runs_at_once_count_their_own(counter: Counter) -> None:
    found: dict[int, int] = {}
    both = threading.Barrier(2)

    def run(size_bytes: int) -> None:
        with counter.counting(limit_bytes=size_bytes) as count:
            both.wait()
            for _ in range(1000):
                block(size_bytes)
            both.wait()
        found[size_bytes] = count.peak_bytes

    threads = [threading.Thread(target=run, args=(size,)) for size in (100, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {100: 100, 3000: 3000}


def test_storages_that_change_their_size(counter: Counter) -> None:
    with counter.counting() as count:
        storage = block(1000).untyped_storage()
        storage.resize_(0)
        assert count.live_bytes == 0
        storage.resize_(300)
        assert count.live_bytes == 300
        count.adjust(-300)
        assert count.mark() == 0
        assert count.peak_bytes == 0


def test_a_run_that_nobody_ends_ends_with_its_last_reference(counter: Counter) -> None:
    counting = counter.counting(limit_bytes=0)
    counting.__enter__()
    with pytest.raises(torch.OutOfMemoryError):
        block(1)
    del counting
    block(1)


def test_an_interrupt_at_any_line_leaves_no_limit_behind(counter: Counter) -> None:
    num_steps = 0

    def interrupted(at: int) -> bool:
        nonlocal num_steps
        num_steps = 0

        def look(*_: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == at:
                raise KeyboardInterrupt
            return look

        sys.settrace(look)
        try:
            with counter.counting(limit_bytes=8):
                block(8)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    at = 1
    while interrupted(at):
        assert block(1 << 10).nbytes == 1 << 10
        at += 1
    assert at > 20


def test_a_fork_while_another_thread_takes_memory(counter: Counter) -> None:
    ended = threading.Event()

    def take() -> None:
        with counter.counting():
            while not ended.is_set():
                block(100)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with counter.counting():
            kept = [block(10)]
            for _ in range(30):
                child = os.fork()
                if not child:
                    signal.alarm(10)
                    kept.clear()
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                assert status == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_another_copy_of_the_library_takes_its_turn(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = {line.split()[-1] for line in MAPS.read_text().splitlines() if "/allocator-" in line}
    library = Path(min(path for path in loaded if path.endswith(".so")))
    (tmp_path / "native").mkdir()
    shutil.copy(library, tmp_path / "native" / library.name)
    monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [])
    other = allocation_counter(tmp_path)
    assert other is not None
    with other.counting() as count:
        block(100)
    assert count.peak_bytes == 100
    assert counter.install()
    with counter.counting() as count:
        block(100)
    assert count.peak_bytes == 100
