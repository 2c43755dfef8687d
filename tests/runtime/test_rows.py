"""Rows of a weight as byte ranges: compared with slices of the whole."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import reserve_bytes
from gascompile.core.sources import Extent, WeightSource
from gascompile.core.tiles import Tile
from gascompile.runtime.protocols import read_at
from gascompile.runtime.transfer.engine import Engine
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.read_plan import Landing, plan_landing
from gascompile.runtime.transfer.rows import rows_landing, tile_source
from tests.waiting import eventually

ROWS, WIDTH = 40, 30


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)


@pytest.fixture
def source(table: torch.Tensor, tmp_path: Path) -> WeightSource:
    """Return the table in three extents of two files, cut within rows."""
    raw = table.numpy().tobytes()
    cuts = (0, 7 * 4 * WIDTH + 8, 20 * 4 * WIDTH, len(raw))
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"x" * 12 + raw[cuts[0] : cuts[1]] + b"y" * 100 + raw[cuts[2] : cuts[3]])
    other.write_bytes(b"z" * 4 + raw[cuts[1] : cuts[2]])
    extents = (
        Extent(path=str(one), offset=12, size_bytes=cuts[1]),
        Extent(path=str(other), offset=4, size_bytes=cuts[2] - cuts[1]),
        Extent(path=str(one), offset=112 + cuts[1], size_bytes=cuts[3] - cuts[2]),
    )
    return WeightSource(name="table", dtype="float32", shape=(ROWS, WIDTH), extents=extents)


def read(source: WeightSource, landing: Landing, num_rows: int) -> torch.Tensor:
    memory = bytearray(reserve_bytes(landing.size_bytes) + 4096)
    files = SourceFiles([extent.path for extent in source.extents])
    engine = Engine(files, memoryview(bytearray(1)), IoSettings(num_threads=3))
    try:
        engine.submit(landing, 0, key=0, link="", memory=memoryview(memory)).wait()
    finally:
        engine.close()
        files.close()
    start = landing.shift_bytes
    taken = memory[start : start + landing.size_bytes]
    return torch.frombuffer(taken, dtype=torch.float32).reshape(num_rows, WIDTH)


@pytest.mark.parametrize(("begin", "end"), [(0, 40), (0, 7), (7, 8), (5, 31), (20, 40), (39, 40)])
def test_a_tile_is_a_slice(source: WeightSource, table: torch.Tensor, begin: int, end: int) -> None:
    tile = tile_source(source, Tile("table", begin, end))
    assert (tile.name, tile.shape) == (f"table[{begin}:{end}]", (end - begin, WIDTH))
    assert tile.size_bytes == (end - begin) * WIDTH * 4
    landing = plan_landing(tile, chunk_bytes=4096, is_direct=lambda _path: False)
    assert torch.equal(read(source, landing, end - begin), table[begin:end])


@pytest.mark.parametrize("rows", [[7], [0, 39], [7, 7, 3, 20], list(range(ROWS))])
def test_gathered_rows_come_in_the_order_asked_for(
    source: WeightSource, table: torch.Tensor, rows: list[int]
) -> None:
    landing = rows_landing(source, rows)
    assert landing.size_bytes == len(rows) * WIDTH * 4
    assert torch.equal(read(source, landing, len(rows)), table[rows])


def test_the_engine_lets_go_of_memory_that_is_not_its_own(source: WeightSource) -> None:
    memory = bytearray(WIDTH * 4)
    files = SourceFiles([extent.path for extent in source.extents])
    engine = Engine(files, memoryview(bytearray(1)), IoSettings(num_threads=4))
    landing = rows_landing(source, [3])
    engine.submit(landing, 0, key=0, link="", memory=memoryview(memory)).wait()
    assert eventually(lambda: not _is_held(memory))
    engine.close()
    files.close()


def _is_held(memory: bytearray) -> bool:
    """Return whether a view of ``memory`` is alive: its size is fixed that long."""
    try:
        memory.append(0)
    except BufferError:
        return True
    return False


def test_no_rows_are_no_reads(source: WeightSource) -> None:
    assert rows_landing(source, []).pieces == ()


def test_rows_are_read_while_every_thread_is_at_something_else(
    source: WeightSource, table: torch.Tensor
) -> None:
    """Without the help of who waits for them they would come after the chunks that threads are reading."""
    begun, gate = threading.Event(), threading.Event()

    def reader(descriptor: int, into: memoryview, offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            gate.wait()
        return read_at(descriptor, into, offset)

    files = SourceFiles([extent.path for extent in source.extents])
    engine = Engine(files, memoryview(bytearray(1)), IoSettings(num_threads=1), reader=reader)
    bulk, rows = bytearray(WIDTH * 4), bytearray(2 * WIDTH * 4)
    held = engine.submit(
        rows_landing(source, [0]), 0, key=0, link="", memory=memoryview(bulk), on_done=lambda: None
    )
    assert begun.wait(10)
    engine.submit(rows_landing(source, [3, 1]), 0, key=1, link="", memory=memoryview(rows)).wait()
    assert bytes(rows) == table[[3, 1]].numpy().tobytes()
    assert not held.done
    gate.set()
    held.wait()
    engine.close()
    files.close()


def test_an_error_of_the_thread_that_helps_is_its_own(source: WeightSource) -> None:
    def reader(descriptor: int, into: memoryview, offset: int) -> int:
        raise OSError(5, "the drive is gone")

    files = SourceFiles([extent.path for extent in source.extents])
    engine = Engine(files, memoryview(bytearray(1)), IoSettings(num_threads=1), reader=reader)
    rows = memoryview(bytearray(WIDTH * 4))
    with pytest.raises(StorageError, match="the drive is gone"):
        engine.submit(rows_landing(source, [3]), 0, key=0, link="", memory=rows).wait()
    engine.drain()
    engine.close()
    files.close()


@pytest.mark.parametrize("raised", [OSError, KeyboardInterrupt])
def test_a_failed_read_keeps_nothing_of_its_callers(
    source: WeightSource, raised: type[BaseException]
) -> None:
    """Activations of a run that has failed would stay in memory beside those of the next."""

    def reader(descriptor: int, into: memoryview, offset: int) -> int:
        raise raised(5, "the drive is gone")

    held: list[weakref.ref[torch.Tensor]] = []

    def run() -> None:
        activation = torch.zeros(8)
        held.append(weakref.ref(activation))
        rows = memoryview(bytearray(WIDTH * 4))
        engine.submit(rows_landing(source, [3]), 0, key=0, link="", memory=rows).wait()

    files = SourceFiles([extent.path for extent in source.extents])
    engine = Engine(files, memoryview(bytearray(1)), IoSettings(num_threads=1), reader=reader)
    gc.disable()
    try:
        # One row in one extent: the thread that waits reads it.
        with pytest.raises((StorageError, KeyboardInterrupt), match="the drive is gone") as caught:
            run()
        del caught
        assert held[0]() is None
    finally:
        gc.enable()
        engine.close()
        files.close()
