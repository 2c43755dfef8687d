"""Values that lie in files of others: read from anywhere in them, never written, and refused once they have changed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES, SPILL_BUFFER_BYTES
from gascompile.core.sources import Extent, WeightSource
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.source_slots import SourceSlots

SIZES = st.one_of(
    st.integers(1, 3 * PAGE_BYTES),
    st.integers(16 * PAGE_BYTES, 20 * PAGE_BYTES),
    # Beyond what is moved while as much is read.
    st.integers(9 << 20, (9 << 20) + 3 * PAGE_BYTES),
)
GAPS = st.one_of(st.just(0), st.integers(0, 2 * PAGE_BYTES), st.just(PAGE_BYTES))


def written(path: Path, ranges: Sequence[tuple[int, int]]) -> tuple[bytes, tuple[Extent, ...]]:
    """Write a file of random bytes; return the value that its ranges are, gaps and sizes, and where they lie."""
    total = sum(gap + size for gap, size in ranges)
    content = torch.randint(0, 256, (total,), dtype=torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    extents, value, at = [], b"", 0
    for gap, size in ranges:
        at += gap
        extents.append(Extent(path=str(path), offset=at, size_bytes=size))
        value += content[at : at + size]
        at += size
    return value, tuple(extents)


def slots(name: str, extents: tuple[Extent, ...]) -> SourceSlots:
    size = sum(extent.size_bytes for extent in extents)
    source = WeightSource(name=name, dtype="uint8", shape=(size,), extents=extents)
    return SourceSlots({name: source}, [])


def kept(tmp_path: Path, sources: SourceSlots, size: int, pages: Pages | None = None) -> Persistent:
    """Return ``x``, which lies in a file, and ``own``, which does not."""
    tensors = {"x": torch.empty(size, dtype=torch.uint8), "own": torch.ones(5)}
    buffers = memoryview(mmap.mmap(-1, 2 * SPILL_BUFFER_BYTES))
    return Persistent(
        tensors, {}, tmp_path / "spill", buffers, pages, unread=["x"], sources=sources
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    # A copy: storages that NumPy has seen cannot give their memory back.
    return tensor.clone().numpy().tobytes()


@pytest.mark.parametrize("in_blocks", [True, False])
@settings(max_examples=25, deadline=None)
@given(ranges=st.lists(st.tuples(GAPS, SIZES), min_size=1, max_size=3))
def test_values_come_from_anywhere_in_a_file(
    pages: Pages,
    tmp_path_factory: pytest.TempPathFactory,
    in_blocks: bool,
    ranges: list[tuple[int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("files")
    value, extents = written(folder / "weights", ranges)
    persistent = kept(folder, slots("x", extents), len(value), pages if in_blocks else None)
    assert persistent.is_away("x")
    assert os.fstat(persistent.places()["own"][0]).st_size == PAGE_BYTES
    with pages.active(1 << 40):
        persistent.read("x").wait()
    assert bytes_of(persistent.tensors["x"]) == value
    persistent.drop("x")
    assert bytes_of(persistent.value("x")) == value
    target = os.open(folder / "copy", os.O_RDWR | os.O_CREAT)
    assert persistent.copy_to("x", target, 7)
    os.close(target)
    assert (folder / "copy").read_bytes()[7:] == value
    persistent.close()
    assert list((folder / "spill").iterdir()) == []


RANGES = [(100, 70_000)]


def test_a_new_value_gets_a_slot_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    value, extents = written(tmp_path / "weights", RANGES)
    before = os.stat(tmp_path / "weights")
    persistent = kept(tmp_path, slots("x", extents), len(value))
    spilled = persistent.places()["own"][0]
    # The same bytes again are no new value.
    persistent.assign("x", torch.frombuffer(bytearray(value), dtype=torch.uint8))
    assert persistent.is_in_place("x")
    assert persistent.is_away("x")
    assert os.fstat(spilled).st_size == PAGE_BYTES
    new = torch.frombuffer(bytearray(value), dtype=torch.uint8).clone()
    new[-1] ^= 1
    persistent.assign("x", new)
    assert not persistent.is_in_place("x")
    assert os.fstat(spilled).st_size == PAGE_BYTES + 18 * PAGE_BYTES
    os.remove(tmp_path / "weights")
    persistent.require_sources()
    assert torch.equal(persistent.value("x"), new)
    assert (before.st_size, before.st_mtime_ns) == (len(value) + 100, before.st_mtime_ns)
    persistent.close()


def test_a_value_that_an_op_changes_is_written_to_a_slot(tmp_path: Path) -> None:
    value, extents = written(tmp_path / "weights", RANGES)
    persistent = kept(tmp_path, slots("x", extents), len(value))
    persistent.take_slots(["x", "own"])
    persistent.read("x").wait()
    persistent.changed(["x"])
    persistent.tensors["x"].zero_()
    with pytest.raises(StorageError, match="would lose its value"):
        persistent.drop("x")
    persistent.write("x").wait()
    persistent.drop("x")
    assert not persistent.value("x").any()
    assert (tmp_path / "weights").read_bytes()[100:] == value
    persistent.close()


def test_a_slot_for_which_there_is_no_space_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, extents = written(tmp_path / "weights", RANGES)
    persistent = kept(tmp_path, slots("x", extents), len(value))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left"):
        persistent.take_slots(["x"])
    persistent.read("x").wait()
    with pytest.raises(StorageError, match="No space left"):
        persistent.changed(["x"])
    assert persistent.num_changes == 0
    persistent.drop("x")
    assert bytes_of(persistent.value("x")) == value
    persistent.close()


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"other")


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (rewritten, "was changed or replaced"),
        (cut, "was changed or replaced"),
        (replaced, "was changed or replaced"),
        (os.remove, "is gone"),
    ],
)
def test_files_that_are_not_what_they_were_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    value, extents = written(tmp_path / "weights", RANGES)
    persistent = kept(tmp_path, slots("x", extents), len(value))
    persistent.require_sources()
    spoil(tmp_path / "weights")
    with pytest.raises(StorageError, match=words):
        persistent.require_sources()
    if spoil in (rewritten, cut):
        with pytest.raises(StorageError, match="was changed"):
            persistent.value("x")
        assert not persistent.has_sources()
    else:
        # The open file is still the one that it was.
        assert bytes_of(persistent.value("x")) == value
    # A value of one's own takes the place of what is lost.
    persistent.assign("x", torch.frombuffer(bytearray(value), dtype=torch.uint8))
    if spoil in (rewritten, cut):
        persistent.require_sources()
    assert bytes_of(persistent.value("x")) == value
    persistent.close()
