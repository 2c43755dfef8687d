"""The store of kernels: what is kept is found by others like it, damage is seen, and writers may meet."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from gascompile.codegen import store as kernel_store
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.kernels import Kernel, KernelFiles, KernelLibrary, Launch, Layout, Pointer

HERE = {"torch": "2", "processor": "new"}
ROW = Layout(dtype="float32", shape=(8,), stride=(1,))
KERNEL = Kernel(
    inputs=(ROW,),
    outputs=(ROW,),
    launches=(Launch(symbol="twice", arguments=(Pointer(place=0), Pointer(place=1))),),
)


def library(code: bytes, *keys: str) -> KernelFiles:
    record = KernelLibrary(built_for=HERE, kernels=dict.fromkeys(keys, KERNEL))
    return KernelFiles(record=serial.dumps(record).encode(), code=code)


def test_kernels_are_found_by_key_where_they_run(tmp_path: Path) -> None:
    files = library(b"code", "a", "b")
    kernel_store.keep(files, tmp_path)
    assert kernel_store.find(["a", "b", "c"], HERE, tmp_path) == dict.fromkeys("ab", files.digest)
    assert kernel_store.find(["a"], {**HERE, "processor": "old"}, tmp_path) == {}
    read = kernel_store.read(files.digest, tmp_path)
    assert read == files
    assert kernel_store.read_record(files.record).kernels == {"a": KERNEL, "b": KERNEL}
    assert kernel_store.is_trusted(files.digest, tmp_path)
    assert not kernel_store.is_trusted(library(b"other", "a").digest, tmp_path)


@pytest.mark.parametrize("suffix", ["so", "json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damage_is_seen(
    suffix: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = library(b"code" * 100, "a")
    kernel_store.keep(files, tmp_path)
    file = kernel_store.folder_of(tmp_path) / f"{files.digest}.{suffix}"
    raw = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(raw[:50] if damage == "cut" else raw[:-1] + bytes([raw[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, logger="gascompile"):
        assert kernel_store.read(files.digest, tmp_path) is None
    assert "compiling again" in caplog.text
    kernel_store.keep(files, tmp_path)
    assert kernel_store.read(files.digest, tmp_path) == files


def test_a_damaged_key_is_no_kernel(tmp_path: Path) -> None:
    kernel_store.keep(library(b"code", "a"), tmp_path)
    (key,) = (kernel_store.folder_of(tmp_path) / "keys").iterdir()
    for text in (b"../../etc/passwd", b"", b"\xff\xfe", b"0" * 40):
        key.write_bytes(text)
        assert kernel_store.find(["a"], HERE, tmp_path) == {}


def test_a_record_that_is_none_is_refused() -> None:
    for record in (b"", b"[]", b'{"format": "gascompile.kernels/2"}'):
        with pytest.raises(FormatError):
            kernel_store.read_record(record)


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file")
    with pytest.raises(StorageError, match="kernels"):
        kernel_store.keep(library(b"code", "a"), tmp_path)


def test_writers_of_the_same_kernels_meet_readers(tmp_path: Path) -> None:
    """Compilers make other bytes each time; a reader gets the one library or the other, and always whole."""
    makes = [library(bytes([i]) * 50_000, "a") for i in range(4)]
    kernel_store.keep(makes[0], tmp_path)
    done = threading.Event()

    def write(files: KernelFiles) -> None:
        for _ in range(10):
            kernel_store.keep(files, tmp_path)

    writers = [threading.Thread(target=write, args=(files,)) for files in makes]
    found: set[str] = set()

    def read() -> None:
        while not done.is_set():
            digest = kernel_store.find(["a"], HERE, tmp_path)["a"]
            files = kernel_store.read(digest, tmp_path)
            found.add(digest if files in makes else "damaged")

    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert found
    assert found <= {files.digest for files in makes}
