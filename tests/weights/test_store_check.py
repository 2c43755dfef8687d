"""Files of the weight store are read again after each boot and each change, and made again where a bit has flipped."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gascompile.core import files
from gascompile.weights.checkpoint import open_checkpoint
from gascompile.weights.convert import Item, conversion_errors, converted
from gascompile.weights.store import content_digest, file_digest, spill
from gascompile.weights.store_check import NOTES, Hash

TENSORS = {
    "half": torch.arange(31, dtype=torch.float16),
    "empty": torch.zeros(0, 3),
    "one": torch.tensor(2.5, dtype=torch.float64),
    "matrix": torch.arange(64.0).reshape(8, 8).t(),
    "flags": torch.tensor([True, False]),
}
Make = Callable[[Path], Path]


def spilled(folder: Path) -> Path:
    return Path(spill(TENSORS, folder / "store").stamps[0].path)


def packed(folder: Path) -> Path:
    source = folder / "model.safetensors"
    if not source.exists():
        save_file({"w": torch.arange(128.0).reshape(4, 32)}, source)
    checkpoint = open_checkpoint(source)
    items = {"w": Item(source=checkpoint.sources["w"], wire="int8")}
    return Path(converted(items, checkpoint.stamps, folder / "store").stamps[0].path)


def flip(path: Path, at: int) -> None:
    """Change one bit as a drive does: no time moves but the one that no one can set."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture(params=[spilled, packed])
def make(request: pytest.FixtureRequest) -> Make:
    making: Make = request.param
    return making


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been hashed from files."""
    read: list[str] = []
    whole = Hash.add_file

    def counted(self: Hash, path: str | os.PathLike[str], *rest: object) -> None:
        read.append(Path(path).name)
        whole(self, path, *rest)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(Hash, "add_file", counted)
    return read


def test_a_flipped_bit_is_found_wherever_it_is(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    spots = random.Random(0).sample(range(len(whole)), 40)
    for count, at in enumerate([0, 7, 8, len(whole) - 1, *spots], start=1):
        flip(path, at)
        assert make(tmp_path) == path
        assert path.read_bytes() == whole, at
        assert caplog.text.count("is made again") == count


def test_a_file_that_was_cut_is_made_again(make: Make, tmp_path: Path) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    for size_bytes in (0, 5, 20, len(whole) - 1):
        os.truncate(path, size_bytes)
        make(tmp_path)
        assert path.read_bytes() == whole


def test_what_was_found_whole_is_believed_until_the_next_boot(
    make: Make, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    make(tmp_path)
    assert not reads
    os.utime(path)
    make(tmp_path)
    assert set(reads) == {path.name}
    reads.clear()
    make(tmp_path)
    assert not reads
    (tmp_path / "boot").write_text("another\n", encoding="ascii")
    monkeypatch.setattr(files, "_BOOT", tmp_path / "boot")
    make(tmp_path)
    assert set(reads) == {path.name}


@pytest.mark.parametrize("notes", ["", "[]", '{"boot": 1}', '{"files": {"x": 3}, "boot": null}'])
def test_damaged_notes_are_none(make: Make, tmp_path: Path, reads: list[str], notes: str) -> None:
    path = make(tmp_path)
    place = path.parent / NOTES
    known = json.loads(place.read_text())
    place.write_text(notes)
    make(tmp_path)
    assert set(reads) == {path.name}
    assert json.loads(place.read_text()) == known


def test_a_file_that_is_gone_is_noted_no_longer(tmp_path: Path) -> None:
    first = spilled(tmp_path)
    first.unlink()
    second = packed(tmp_path)
    assert list(json.loads((second.parent / NOTES).read_text())["files"]) == [second.name]


def test_files_hold_what_they_should(tmp_path: Path) -> None:
    path = spilled(tmp_path)
    assert file_digest(path, lambda n: None) == content_digest(TENSORS) == path.stem
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert 0 <= conversion_errors(packed(tmp_path))["w"] < 0.02
