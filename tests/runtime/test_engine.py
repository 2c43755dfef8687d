"""Bytes land where they should, by the path that is reported, and failures are typed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import PAGE_BYTES, reserve_bytes
from gascompile.core.sources import Extent, WeightSource
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.protocols import Reader, Ticket, read_at
from gascompile.runtime.transfer.engine import Engine, read_blocks
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.read_plan import Landing, plan_landing
from tests.waiting import eventually

SPOILED = 0xA5
CHUNK = 2 * PAGE_BYTES


class Bench:
    """An engine on one arena and some files."""

    def __init__(self, paths: list[Path], reader: Reader, num_threads: int) -> None:
        self.arena = Arena(64 * PAGE_BYTES)
        self.files = SourceFiles([str(path) for path in paths])
        io = IoSettings(num_threads=num_threads, chunk_bytes=CHUNK)
        self.engine = Engine(self.files, self.arena.memory, io, reader=reader)

    def landing(self, *extents: tuple[Path, int, int], dtype: str = "uint8") -> Landing:
        parts = tuple(Extent(path=str(p), offset=o, size_bytes=n) for p, o, n in extents)
        size = sum(part.size_bytes for part in parts)
        source = WeightSource(name="w", dtype=dtype, shape=(size,), extents=parts)
        return plan_landing(source, chunk_bytes=CHUNK, is_direct=self.files.is_direct)

    def start(self, landing: Landing, address: int = 0, key: int = 0) -> Ticket:
        return self.engine.submit(landing, address, key=key, link="nvme->cpu")

    def read(self, landing: Landing, address: int = PAGE_BYTES) -> bytes:
        """Read and check that nothing outside the reservation was touched."""
        self.arena.fill(0, self.arena.size_bytes, SPOILED)
        self.start(landing, address).wait()
        memory = self.arena.memory
        stop = address + reserve_bytes(landing.size_bytes)
        assert bytes(memory[:address]) == bytes([SPOILED]) * address
        assert bytes(memory[stop:]) == bytes([SPOILED]) * (self.arena.size_bytes - stop)
        first = address + landing.shift_bytes
        return bytes(memory[first : first + landing.size_bytes])

    @property
    def path(self) -> str:
        return self.engine.paths["nvme->cpu"]


@contextmanager
def bench(*paths: Path, reader: Reader = read_at, num_threads: int = 3) -> Iterator[Bench]:
    made = Bench(list(paths), reader, num_threads)
    try:
        yield made
    finally:
        made.engine.close()
        made.files.close()


@pytest.fixture
def content() -> bytes:
    return torch.randint(0, 256, (11 * PAGE_BYTES + 777,), dtype=torch.uint8).numpy().tobytes()


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    return path


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES - 1, 2 * PAGE_BYTES + 5])
def test_every_residue_lands(file: Path, content: bytes, size_bytes: int) -> None:
    with bench(file) as b:
        for offset in range(0, PAGE_BYTES, 1 if size_bytes == 1 else 7):
            landing = b.landing((file, offset, size_bytes))
            assert landing.shift_bytes == offset % PAGE_BYTES
            assert b.read(landing) == content[offset : offset + size_bytes]
        assert b.path == "O_DIRECT"


def test_end_of_file_is_read(file: Path, content: bytes) -> None:
    with bench(file) as b:
        for size_bytes in (1, 700, 777, 778, 3 * PAGE_BYTES):
            landing = b.landing((file, len(content) - size_bytes, size_bytes))
            assert b.read(landing) == content[-size_bytes:]
        assert b.path == "O_DIRECT"


def test_elements_that_would_be_misaligned_take_the_page_cache(file: Path, content: bytes) -> None:
    with bench(file) as b:
        landing = b.landing((file, 4098, 4000), dtype="float32")
        assert landing.shift_bytes == 0
        assert b.read(landing) == content[4098:8098]
        assert b.path == "page cache"
        assert b.landing((file, 4100, 4000), dtype="float32").shift_bytes == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, PAGE_BYTES), (5 * PAGE_BYTES, PAGE_BYTES)),
        ((100, PAGE_BYTES), (5 * PAGE_BYTES + 100, 2 * PAGE_BYTES)),
        ((100, 3 * PAGE_BYTES), (5 * PAGE_BYTES + 100, 3 * PAGE_BYTES + 9)),
        ((100, 50), (150, 50)),
        ((100, 50), (9000, 50)),
        ((0, 10), (8 * PAGE_BYTES, 9000)),
        ((4000, 9000), (500, 7)),
    ],
)
def test_extents_follow_each_other(
    file: Path, content: bytes, first: tuple[int, int], second: tuple[int, int]
) -> None:
    with bench(file) as b:
        landing = b.landing((file, *first), (file, 0, 0), (file, *second))
        expected = b"".join(content[o : o + n] for o, n in (first, second))
        assert b.read(landing) == expected


def test_extents_of_two_files(file: Path, content: bytes, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(content[::-1])
    with bench(file, other) as b:
        landing = b.landing((file, PAGE_BYTES, PAGE_BYTES), (other, 2 * PAGE_BYTES, 5000))
        expected = content[PAGE_BYTES : 2 * PAGE_BYTES] + content[::-1][8192 : 8192 + 5000]
        assert b.read(landing) == expected
        assert b.path == "O_DIRECT"


def test_nothing_to_read_is_done_at_once(file: Path) -> None:
    with bench(file) as b:
        ticket = b.start(b.landing((file, 100, 0)))
        assert ticket.done
        ticket.wait()


def test_truncated_file_is_named(file: Path, content: bytes) -> None:
    with bench(file) as b, pytest.raises(StorageError, match=r"weights\.bin ends too early.*'w'"):
        b.read(b.landing((file, len(content) - 100, 5000)))


def test_read_error_is_named(file: Path) -> None:
    def broken(descriptor: int, into: memoryview, offset: int, /) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with bench(file, reader=broken) as b:
        ticket = b.start(b.landing((file, PAGE_BYTES, 5000)))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"offset 4096 of .*weights\.bin.*Input/output"):
                ticket.wait()


def test_short_reads_are_continued(file: Path, content: bytes) -> None:
    def short(descriptor: int, into: memoryview, offset: int, /) -> int:
        return read_at(descriptor, into[: max(PAGE_BYTES, len(into) // 2)], offset)

    with bench(file, reader=short) as b:
        assert b.read(b.landing((file, 50, 30000))) == content[50:30050]


def test_direct_read_within_a_page_goes_on_in_the_page_cache(file: Path, content: bytes) -> None:
    def odd(descriptor: int, into: memoryview, offset: int, /) -> int:
        return min(read_at(descriptor, into, offset), 1000)

    with bench(file, reader=odd) as b:
        assert b.read(b.landing((file, 50, 30000))) == content[50:30050]
        assert "page cache" in b.path


def test_refused_direct_reads_fall_back_with_one_warning(
    file: Path, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, into: memoryview, offset: int, /) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read_at(descriptor, into, offset)

    other = tmp_path / "other.bin"
    other.write_bytes(content)
    with caplog.at_level(logging.WARNING), bench(file, other, reader=refuse) as b:
        for path in (file, other):
            assert b.read(b.landing((path, 50, 30000))) == content[50:30050]
        assert b.path == "page cache"
    assert len(caplog.records) == 1
    assert "page cache" in caplog.text


def test_refused_direct_open_falls_back_with_one_warning(
    file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with bench(file) as b:
        landing = b.landing((file, 51, 30000))
        assert landing.shift_bytes == 0
        assert b.read(landing) == content[51:30051]
        assert b.path == "page cache"
    assert len(caplog.records) == 1


def test_both_paths_are_reported(file: Path) -> None:
    with bench(file) as b:
        b.read(b.landing((file, 0, 5000)))
        b.read(b.landing((file, 1, 4000), dtype="float32"))
        assert b.path == "O_DIRECT + page cache"


class Gate:
    """A reader that records its reads and holds them until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.offsets: list[int] = []

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int:
        self.entered.set()
        assert self.open.wait(60)
        self.offsets.append(offset)
        return read_at(descriptor, into, offset)


def test_most_urgent_first_and_chunks_together(file: Path) -> None:
    gate = Gate()
    with bench(file, reader=gate, num_threads=1) as b:
        b.start(b.landing((file, 0, 1)), key=9)
        assert gate.entered.wait(60)
        late = b.start(b.landing((file, 2 * PAGE_BYTES, 3 * PAGE_BYTES)), 8 * PAGE_BYTES, key=7)
        b.start(b.landing((file, 6 * PAGE_BYTES, PAGE_BYTES)), 16 * PAGE_BYTES, key=3)
        b.start(b.landing((file, 7 * PAGE_BYTES, PAGE_BYTES)), 20 * PAGE_BYTES, key=3)
        gate.open.set()
        late.wait()
        assert [offset // PAGE_BYTES for offset in gate.offsets] == [0, 6, 7, 2, 4]


def test_drain_cancels_the_queue_and_waits_for_reads_in_flight(file: Path) -> None:
    gate = Gate()
    with bench(file, reader=gate, num_threads=1) as b:
        running = b.start(b.landing((file, 0, PAGE_BYTES)))
        half = b.start(b.landing((file, 0, 3 * PAGE_BYTES)), 8 * PAGE_BYTES)
        assert gate.entered.wait(60)
        drained = threading.Thread(target=b.engine.drain)
        known = b.engine.pool.num_messages
        drained.start()
        assert eventually(lambda: b.engine.pool.num_messages > known)
        assert drained.is_alive()
        gate.open.set()
        drained.join(60)
        running.wait()
        assert half.failed
        with pytest.raises(StorageError, match="cancelled"):
            half.wait()
        assert len(gate.offsets) == 1
        b.start(b.landing((file, 0, 10))).wait()


def test_failed_request_waits_for_its_chunks_in_flight(file: Path) -> None:
    release = threading.Event()
    finished: list[int] = []

    def reader(descriptor: int, into: memoryview, offset: int, /) -> int:
        if not offset:
            raise OSError(errno.EIO, "broken")
        assert release.wait(60)
        finished.append(offset)
        return read_at(descriptor, into, offset)

    with bench(file, reader=reader, num_threads=2) as b:
        ticket = b.start(b.landing((file, 0, 8 * PAGE_BYTES)))
        threading.Timer(0.05, release.set).start()
        with pytest.raises(StorageError):
            ticket.wait()
        assert b.engine.pool.in_flight <= 1
        assert len(finished) <= 1


def test_close_joins_and_refuses(file: Path) -> None:
    with bench(file) as b:
        b.engine.close()
        b.engine.close()
        assert not any(thread.is_alive for thread in b.engine.pool.threads)
        with pytest.raises(StorageError, match="closed"):
            b.start(b.landing((file, 0, 10)))


def test_a_raising_callback_is_the_waiters_and_threads_survive(file: Path) -> None:
    def fail() -> None:
        raise KeyError("progress")

    with bench(file, num_threads=1) as b:
        landing = b.landing((file, 0, 10))
        ticket = b.engine.submit(landing, 0, key=0, link="nvme->cpu", on_done=fail)
        with pytest.raises(KeyError, match="progress"):
            ticket.wait()
        b.start(landing).wait()


def test_read_blocks_times_a_part_of_a_file(file: Path, content: bytes) -> None:
    arena = Arena(16 * PAGE_BYTES)
    io = IoSettings(num_threads=2, chunk_bytes=CHUNK)
    found = read_blocks(str(file), offset=100, size_bytes=20000, into=arena.memory, io=io)
    assert found.time_s > 0
    assert found.path == "O_DIRECT"
    assert bytes(arena.memory[100:20100]) == content[100:20100]
    with pytest.raises(ValueError, match="needs"):
        read_blocks(str(file), offset=0, size_bytes=20 * PAGE_BYTES, into=arena.memory, io=io)
    with pytest.raises(StorageError, match="absent"):
        read_blocks(str(file.parent / "absent"), offset=0, size_bytes=1, into=arena.memory, io=io)


def test_arena_views_are_checked() -> None:
    arena = Arena(PAGE_BYTES)
    arena.fill(0, PAGE_BYTES, 0xFF)
    view = arena.view(8, "bfloat16", (2, 3))
    assert torch.isnan(view).all()
    assert arena.contains(view)
    assert arena.contains(view.t())
    assert not arena.contains(torch.zeros(3))
    assert arena.view(0, "float32", (0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="pass the end"):
        arena.view(8, "uint8", (PAGE_BYTES,))
    arena.close()
    assert not view.any()
