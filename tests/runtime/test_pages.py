"""Blocks keep their contents, whatever their pages were before, and the process holds no more than is in use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.codegen.allocator_library import page_memory
from gascompile.codegen.build import has_compiler
from gascompile.core.sizes import PAGE_BYTES
from gascompile.runtime.memory.heap_memory import own_bytes
from gascompile.runtime.memory.pages import Pages
from tests.runtime.conftest import BUDGET_BYTES

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")

LEAST_BYTES = 16 * PAGE_BYTES
MAPS = Path("/proc/self/maps")


def units(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@given(
    sizes=st.lists(
        st.one_of(
            st.integers(LEAST_BYTES, 3 << 20),
            st.sampled_from([LEAST_BYTES, LEAST_BYTES + 1, 1 << 20, (1 << 20) + 8]),
        ),
        min_size=1,
        max_size=40,
    ),
    choices=st.randoms(use_true_random=False),
    limit_bytes=st.sampled_from([0, 4 << 20, 1 << 40]),
)
def test_contents_stay_and_free_pages_serve_blocks_of_other_sizes(
    pages: Pages, sizes: list[int], choices: random.Random, limit_bytes: int
) -> None:
    pages.trim()
    assert pages.live_bytes == 0
    alive: list[tuple[int, torch.Tensor]] = []
    in_use = most = 0
    with pages.active(limit_bytes):
        pages.mark()
        for number, size in enumerate(sizes):
            block = torch.empty(size, dtype=torch.uint8)
            block.fill_(number)
            alive.append((number, block))
            del block
            in_use += units(size)
            most = max(most, in_use)
            assert pages.live_bytes == in_use
            while alive and choices.random() < 0.5:
                freed, gone = alive.pop(choices.randrange(len(alive)))
                assert bool((gone.numpy() == freed).all())
                in_use -= units(len(gone))
                del gone
        block = torch.empty(0)
        for number, block in alive:
            assert bool((block.numpy() == number).all())
        assert pages.peak_bytes == most
        # Holes add nothing: beyond the limit no page is taken while one is free.
        assert pages.resident_bytes <= max(most, limit_bytes)
    del block
    alive.clear()
    assert pages.live_bytes == 0


def test_blocks_are_whole_pages_and_small_ones_are_the_heaps(pages: Pages) -> None:
    with pages.active(0):
        large = torch.empty(LEAST_BYTES + 5, dtype=torch.uint8)
        small = torch.empty(LEAST_BYTES - 1, dtype=torch.uint8)
    outside = torch.empty(LEAST_BYTES, dtype=torch.uint8)
    assert large.data_ptr() % PAGE_BYTES == 0
    assert pages.capacity(large.data_ptr()) == LEAST_BYTES + PAGE_BYTES
    assert pages.capacity(large.data_ptr() + PAGE_BYTES) == 0
    assert pages.capacity(small.data_ptr()) == 0
    assert pages.capacity(outside.data_ptr()) == 0


def test_other_threads_take_from_the_heap(pages: Pages) -> None:
    found: list[torch.Tensor] = []
    with pages.active(0):
        thread = threading.Thread(target=lambda: found.append(torch.ones(1 << 20)))
        thread.start()
        thread.join()
    assert pages.capacity(found[0].data_ptr()) == 0
    assert pages.live_bytes == 0


def test_a_block_may_be_freed_by_another_thread_and_after_its_time(pages: Pages) -> None:
    with pages.active(0):
        blocks = [torch.ones(1 << 20)]
    assert pages.live_bytes == 4 << 20
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert pages.live_bytes == 0


def test_an_adopted_storage_moves_in_when_it_takes_memory_again(pages: Pages) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    view = tensor[10:20]
    storage = tensor.untyped_storage()
    pages.adopt(storage)
    assert pages.capacity(storage.data_ptr()) == 0
    storage.resize_(0)
    with pages.active(0):
        storage.resize_(4 << 20)
    assert pages.capacity(storage.data_ptr()) == 4 << 20
    tensor.copy_(torch.arange(1 << 20, dtype=torch.float32))
    assert view.tolist() == list(range(10, 20))


def test_what_is_free_goes_back_to_the_kernel(pages: Pages) -> None:
    pages.trim()
    before = own_bytes()
    with pages.active(1 << 40):
        kept = torch.ones(16 << 20, dtype=torch.uint8)
        torch.ones(64 << 20, dtype=torch.uint8)
    assert own_bytes() - before > 70 << 20
    pages.trim()
    assert pages.resident_bytes == 16 << 20
    # The kernel's count may lag behind by some pages.
    assert own_bytes() - before < 24 << 20
    assert int(kept.sum()) == 16 << 20


def test_what_outlives_its_use_goes_back_to_the_kernel_when_it_is_freed(pages: Pages) -> None:
    with pages.active(1 << 40):
        kept = [torch.ones(16 << 20, dtype=torch.uint8)]
    pages.trim()
    assert pages.resident_bytes == 16 << 20
    kept.clear()
    assert pages.resident_bytes == 0
    with pages.active(1 << 40):
        torch.ones(16 << 20, dtype=torch.uint8)
        assert pages.resident_bytes == 16 << 20
    pages.trim()


def test_children_of_forks_can_free_blocks_whatever_other_threads_do(pages: Pages) -> None:
    with pages.active(0):
        blocks = [torch.ones(1 << 18)]
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            pages.capacity(0)
            pages.trim()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if not child:
                signal.alarm(10)
                blocks.clear()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_block_for_which_there_are_no_addresses_is_refused(pages: Pages) -> None:
    assert pages.live_bytes == 0
    loaded = {line.split()[-1] for line in MAPS.read_text().splitlines() if "/allocator-" in line}
    library = min(path for path in loaded if path.endswith(".so"))
    code = (
        "import resource, sys, torch\nfrom pathlib import Path\nfrom gascompile.runtime.memory.pages import Pages\n"
        "pages = Pages(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (60 << 30, 60 << 30))\n"
        "assert pages.install(64 << 20)\n"
        "with pages.active(0):\n    small = torch.zeros(1 << 20)\n"
        "    torch.empty(33 << 30, dtype=torch.uint8)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, library], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "bad_alloc" in done.stderr


def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [])
    assert page_memory(tmp_path / "first", BUDGET_BYTES) is not None
    (whole,) = (tmp_path / "first" / "native").iterdir()
    library = tmp_path / "second" / "native" / whole.name
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [])
    assert page_memory(tmp_path / "second", BUDGET_BYTES) is not None
    assert "damaged" in caplog.text
    assert library.stat().st_size > 1000


def test_without_a_compiler_there_is_none_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert page_memory(tmp_path, BUDGET_BYTES) is None
    assert "no-such-compiler" in caplog.text
