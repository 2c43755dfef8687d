"""Activations in the spill file come back as they left, and a failing disk is a typed error."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES, SPILL_BUFFER_BYTES, align_up
from gascompile.core.steps import Offload, Reload, Step, Wait
from gascompile.core.waiting import own_threads
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.memory.spill_slots import spill_slots
from gascompile.runtime.transfer.page_ring import RingLane

SIZES = st.sampled_from(
    [
        1,
        4095,
        4096,
        4097,
        SPILL_BUFFER_BYTES - 1,
        SPILL_BUFFER_BYTES,
        SPILL_BUFFER_BYTES + 1,
        3 * SPILL_BUFFER_BYTES + 17,
    ]
)


def in_a_row(sizes_bytes: dict[str, int]) -> dict[str, tuple[int, int]]:
    slots: dict[str, tuple[int, int]] = {}
    end = 0
    for name, size_bytes in sizes_bytes.items():
        slots[name] = (end, size_bytes)
        end += align_up(size_bytes, PAGE_BYTES)
    return slots


def buffers() -> memoryview:
    return memoryview(mmap.mmap(-1, 2 * SPILL_BUFFER_BYTES))


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=4))
def test_bytes_come_back(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("spill")
    tensors = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    spill = Spill(
        folder, in_a_row({name: len(tensor) for name, tensor in tensors.items()}), buffers()
    )
    writes = [spill.write(name, tensor.untyped_storage()) for name, tensor in tensors.items()]
    for ticket in writes:
        ticket.wait()
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    for name, tensor in tensors.items():
        tensor.untyped_storage().resize_(kept[name].nbytes)
        spill.read(name, tensor.untyped_storage()).wait()
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)
    spill.close()
    assert list(folder.iterdir()) == []


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    def part_read(descriptor: int, into: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [into[:4096]], offset)

    def part_write(descriptor: int, data: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data[:8192], offset)

    tensor = torch.arange(50_000)
    kept = tensor.clone()
    spill = Spill(
        tmp_path, {"x": (0, tensor.nbytes)}, buffers(), reader=part_read, writer=part_write
    )
    spill.write("x", tensor.untyped_storage()).wait()
    tensor.zero_()
    spill.read("x", tensor.untyped_storage()).wait()
    assert torch.equal(tensor, kept)
    spill.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_a_storage_error(tmp_path: Path, code: int) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    spill = Spill(tmp_path, {"x": (0, 64)}, buffers(), writer=fail)
    ticket = spill.write("x", torch.zeros(64, dtype=torch.uint8).untyped_storage())
    with pytest.raises(StorageError, match=os.strerror(code)):
        ticket.wait()
    assert ticket.failed
    spill.close()


def test_no_space_is_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="for activations"):
        Spill(tmp_path, {"x": (0, 1 << 60)}, buffers())
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_larger_than_its_slot_is_refused(tmp_path: Path) -> None:
    spill = Spill(tmp_path, {"x": (0, 8)}, buffers())
    with pytest.raises(StorageError, match="its slot 8"):
        spill.write("x", torch.zeros(9, dtype=torch.uint8).untyped_storage())
    spill.close()
    spill.close()
    with pytest.raises(StorageError, match="closed"):
        spill.write("x", torch.zeros(8, dtype=torch.uint8).untyped_storage())


def out(name: str, size_bytes: int) -> Offload:
    return Offload(op=0, tensor=name, link="cpu->nvme", size_bytes=size_bytes)


def back(name: str, size_bytes: int) -> Reload:
    return Reload(op=0, tensor=name, link="nvme->cpu", size_bytes=size_bytes)


def test_a_slot_is_free_again_when_its_tensor_is_back_for_good() -> None:
    a, b, c = 2 * PAGE_BYTES, PAGE_BYTES, 10
    steps: list[Step] = [
        *(out("a", a), Wait(op=0, tensor="a"), out("b", b), Wait(op=0, tensor="b")),
        *(back("a", a), out("c", c), Wait(op=0, tensor="c"), Wait(op=0, tensor="a")),
        *(out("d", b), Wait(op=0, tensor="d"), out("e", b), Wait(op=0, tensor="e")),
        *(back("d", b), Wait(op=0, tensor="d"), out("d", b), Wait(op=0, tensor="d")),
        *(out("f", a), Wait(op=0, tensor="f")),
    ]
    # While a is being read, c cannot take its place; d and e then share it. d leaves twice.
    assert spill_slots(steps) == {
        "a": (0, a),
        "b": (2 * PAGE_BYTES, b),
        "c": (3 * PAGE_BYTES, c),
        "d": (0, b),
        "e": (PAGE_BYTES, b),
        "f": (4 * PAGE_BYTES, a),
    }


def block(pages: Pages, size_bytes: int) -> torch.Tensor:
    with pages.active(1 << 40):
        return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(16 * PAGE_BYTES, 1 << 22), min_size=1, max_size=6))
def test_whole_pages_go_without_a_buffer(
    pages: Pages, tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    tensors = {f"t{i}": block(pages, size) for i, size in enumerate(sizes)}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    folder = tmp_path_factory.mktemp("spill")
    slots = in_a_row({name: len(tensor) for name, tensor in tensors.items()})
    # Through so short a buffer nothing of this could go in one piece.
    spill = Spill(folder, slots, memoryview(bytearray(2)), pages=pages)
    writes = [spill.write(name, tensor.untyped_storage()) for name, tensor in tensors.items()]
    for ticket in reversed(writes):
        ticket.wait()
    for tensor in tensors.values():
        tensor.zero_()
    reads = [spill.read(name, tensor.untyped_storage()) for name, tensor in tensors.items()]
    spill.drain()
    assert all(ticket.done and not ticket.failed for ticket in (*writes, *reads))
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)
    spill.close()


@pytest.mark.parametrize(
    ("device", "writes", "words"),
    [("/dev/full", True, "No space left"), ("/dev/null", False, "the file ends")],
)
def test_a_failed_move_of_pages_is_a_storage_error(
    pages: Pages, tmp_path: Path, device: str, writes: bool, words: str
) -> None:
    tensor = block(pages, 1 << 20)
    kept = tensor.clone()
    spill = Spill(tmp_path, {"t": (0, 1 << 20)}, memoryview(bytearray(2)), pages=pages)
    spill.write("t", tensor.untyped_storage()).wait()
    good = os.dup(spill._file)
    bad = os.open(device, os.O_RDWR)
    os.dup2(bad, spill._file)
    move = spill.write if writes else spill.read
    failed = [move("t", tensor.untyped_storage()) for _ in range(3)]
    for ticket in failed:
        for _ in range(2):
            with pytest.raises(StorageError, match=f"moving 't' failed: {words}"):
                ticket.wait()
        assert ticket.failed
    # Nobody waits for this one.
    move("t", tensor.untyped_storage())
    spill.drain()
    os.dup2(good, spill._file)
    tensor.zero_()
    spill.read("t", tensor.untyped_storage()).wait()
    assert torch.equal(tensor, kept)
    spill.close()
    os.close(good)
    os.close(bad)


def test_a_move_keeps_its_memory_until_it_has_ended(pages: Pages, tmp_path: Path) -> None:
    spill = Spill(tmp_path, {"t": (0, 1 << 20)}, memoryview(bytearray(2)), pages=pages)
    before = pages.live_bytes
    ticket = spill.write("t", block(pages, 1 << 20).untyped_storage())
    # The tensor is gone, its memory is not.
    assert pages.live_bytes == before + (1 << 20)
    ticket.wait()
    assert pages.live_bytes == before
    spill.close()


def test_an_interrupt_before_a_move_is_under_way_leaves_none(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    spill = Spill(tmp_path, {"t": (0, 1 << 20)}, memoryview(bytearray(2)), pages=pages)
    tensor = block(pages, 1 << 20)
    kept = tensor.clone()
    library = spill._lanes[0]._thread._library
    with monkeypatch.context() as patch:
        patch.setattr(library, "gascompile_lane_submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            spill.write("t", tensor.untyped_storage())
    spill.drain()
    spill.write("t", tensor.untyped_storage()).wait()
    tensor.zero_()
    spill.read("t", tensor.untyped_storage()).wait()
    assert torch.equal(tensor, kept)
    spill.close()


def test_an_interrupted_close_is_finished_by_the_next(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_threads()
    spill = Spill(tmp_path, {"t": (0, 1 << 22)}, memoryview(bytearray(2)), pages=pages)
    file = spill._file
    for _ in range(8):
        spill.write("t", block(pages, 1 << 22).untyped_storage())
    with monkeypatch.context() as patch:
        patch.setattr(RingLane, "drain", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            spill.close()
    with pytest.raises(StorageError, match="closed"):
        spill.read("t", block(pages, 1 << 22).untyped_storage())
    spill.close()
    spill.close()
    assert not any(lane._thread.is_open for lane in spill._lanes)
    assert own_threads() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_lane_that_is_dropped_keeps_its_memory_until_moves_have_ended(
    pages: Pages, tmp_path: Path
) -> None:
    before = pages.live_bytes
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    lane = pages.lane()
    for i in range(8):
        storage = block(pages, 1 << 22).untyped_storage()
        lane.submit("t", storage, file, i << 22, writes=True, size_bytes=1 << 22)
    del lane, storage
    gc.collect()
    assert pages.live_bytes == before
    assert os.fstat(file).st_size == 8 << 22
    os.close(file)


def test_a_forked_child_closes_without_the_threads(pages: Pages, tmp_path: Path) -> None:
    spill = Spill(tmp_path, {"t": (0, 1 << 20)}, memoryview(bytearray(2)), pages=pages)
    ticket = spill.write("t", block(pages, 1 << 20).untyped_storage())
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        spill.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ticket.wait()
    spill.close()


def test_without_a_thread_nothing_is_left_behind(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), own_threads()
    lanes = iter([pages.lane()])

    def lane(self: Pages) -> RingLane:
        for found in lanes:
            return found
        raise StorageError("no thread for transfers can be had")

    monkeypatch.setattr(Pages, "lane", lane)
    with pytest.raises(StorageError, match="no thread"):
        Spill(tmp_path, {"t": (0, 1 << 20)}, memoryview(bytearray(2)), pages=pages)
    assert (len(os.listdir("/proc/self/fd")), own_threads()) == (files, threads)


def test_memory_that_is_no_block_goes_through_the_buffer(pages: Pages, tmp_path: Path) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 2 * PAGE_BYTES), dtype=torch.uint8)
    memory[:] = 7
    own = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=PAGE_BYTES + 5)
    kept = own.clone()
    spill = Spill(
        tmp_path,
        in_a_row({"t": PAGE_BYTES + 5}),
        buffers(),
        pages=pages,
    )
    spill.write("t", own.untyped_storage()).wait()
    memory[:] = 1
    spill.read("t", own.untyped_storage()).wait()
    spill.close()
    assert torch.equal(own, kept)
    # Reading whole pages straight into place would have written over the neighbour.
    assert memory[PAGE_BYTES + 5 :].tolist() == [1] * (PAGE_BYTES - 5)
