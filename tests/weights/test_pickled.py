"""Files of ``torch.save``: their tensors are found in place, with the bytes that torch loads, or refused."""

from __future__ import annotations

import json
import os
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CheckpointError, StorageError
from gascompile.core.sources import WeightSource
from gascompile.weights.checkpoint import open_checkpoint
from gascompile.weights.convert import conversion_errors

_WIDTH = 96


def bytes_of(source: WeightSource) -> bytes:
    found = b""
    for extent in source.extents:
        with open(extent.path, "rb") as stream:
            stream.seek(extent.offset)
            found += stream.read(extent.size_bytes)
    return found


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every way to lie in a file: shared, parts of larger ones, of few bytes, of many dtypes."""
    large = torch.randn(40, 30)
    return {
        "large": large,
        "tied": large,
        "rows": large[3:7],
        "part": large.view(-1)[17:29].view(3, 4),
        "half": torch.randn(7).to(torch.bfloat16),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "truth": torch.tensor([True, False, True]),
        "long": torch.arange(9),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "flat": torch.randn(1, 5).expand(1, 5).transpose(0, 1),
        "parameter": nn.Parameter(torch.randn(2, 3)),
    }


def test_tensors_lie_where_torch_loads_them_from(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(odd_tensors(), path)
    found = open_checkpoint(path)
    wanted = torch.load(path, weights_only=True)
    assert found.sources.keys() == wanted.keys()
    for name, value in wanted.items():
        source = found.sources[name]
        assert source.shape == tuple(value.shape)
        assert source.dtype == str(value.dtype).removeprefix("torch.")
        raw = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes_of(source) == raw, name
    assert found.sources["tied"].extents == found.sources["large"].extents
    assert conversion_errors(path) == {}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_torch_reads_and_the_safe_loader_or_checksums_do_not_is_told(tmp_path: Path) -> None:
    newer, bare = tmp_path / "newer.bin", tmp_path / "bare.bin"
    torch.save({"a": torch.randn(3)}, newer, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"protocol.*save it again"):
        open_checkpoint(newer)
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.randn(3)}, bare)
    finally:
        torch.serialization.set_crc32_options(with_checksums)
    with pytest.raises(CheckpointError, match=r"without checksums.*set_crc32_options"):
        open_checkpoint(bare)
    noise = tmp_path / "pytorch_model.bin"
    noise.write_bytes(b"\x93" * 500)
    with pytest.raises(CheckpointError, match=r"nor one of torch.save"):
        open_checkpoint(noise)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_the_model_of_a_loop_is_found(tmp_path: Path, key: str) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    torch.save(
        {key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
        tmp_path / "model.pt",
    )
    found = open_checkpoint(tmp_path / "model.pt").sources
    assert found.keys() == {"weight", "bias"}
    assert bytes_of(found["weight"]) == model.weight.detach().numpy().tobytes()


def test_another_content_has_another_stamp(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 1.0):
        torch.save({"a": torch.full((4,), value)}, tmp_path / "model.bin")
        digests.add(open_checkpoint(tmp_path / "model.bin").stamps[0].digest)
    assert len(digests) == 2


class Anything:
    """Something that only its own library can load."""


class Subclass(torch.Tensor):
    """A tensor that means something of its own."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nn.Linear(2, 2), r"objects of torch\.nn\.modules\.linear\.Linear"),
        ({"a": torch.zeros(2), "args": Anything()}, r"objects of .*Anything.*trust"),
        ({"a": torch.zeros(2), "epoch": 3}, "'epoch' is int"),
        ({"a": torch.zeros(2, 3).t()}, r"'a' of the strides \(1, 3\).*contiguous"),
        ({"a": torch.zeros(1).expand(4)}, "strides"),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, "'a' is of complex64"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is Tensor|not plain"),
        ({"state_dict": {"a": torch.zeros(1)}, "model": {"a": torch.ones(1)}}, "the one that"),
        ({"model": {}}, "no weights by name"),
        ({3: torch.zeros(1)}, "3 is Tensor"),
        ([torch.zeros(1)], r"no weights by name \(list\)"),
        ({}, "no weights by name"),
    ],
)
def test_what_is_no_plain_weight_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "model.bin"
    torch.save(content, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of invariants of sparse tensors
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/harmed",)

    torch.save({"a": Harmful()}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="refuses"):
        open_checkpoint(tmp_path / "model.bin")
    assert not (tmp_path / "harmed").exists()


def test_older_files_programs_and_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save({"a": torch.zeros(3)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6.*save it again"):
        open_checkpoint(old)
    with pytest.raises(CheckpointError, match=r"no pytorch_model\.bin.*'old\.pt'"):
        open_checkpoint(tmp_path)
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/code.py", "pass")
    with pytest.raises(CheckpointError, match="holds a program"):
        open_checkpoint(other)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], *, packed: bool = False) -> None:
    """Write an archive again with other records, or with the same ones packed."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, raw in records.items():
            archive.writestr(name, change(name, raw))


def test_values_that_do_not_lie_in_the_file_as_they_are_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(64, 64)}, path)
    rewritten(path, lambda name, raw: b"big" if name.endswith("/byteorder") else raw)
    with pytest.raises(CheckpointError, match="big-endian"):
        open_checkpoint(path)
    torch.save({"a": torch.zeros(64, 64)}, path)
    rewritten(path, lambda _, raw: raw, packed=True)
    with pytest.raises(CheckpointError, match=r"corrupt|directory"):
        open_checkpoint(path)
    torch.save({"a": torch.zeros(64, 64)}, path)
    rewritten(path, lambda name, raw: raw[:-64] if "/data/" in name else raw)
    with pytest.raises(CheckpointError, match="not where the archive's directory"):
        open_checkpoint(path)


def test_no_order_of_bytes_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(64)}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # of the second record of a name
        for name, raw in records:
            archive.writestr(name, b"big" if name.endswith("/byteorder") else raw)
            if name.endswith("/byteorder"):
                archive.writestr(name, b"little")
    with pytest.raises(CheckpointError, match="two records of one name"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in records:
            if not name.endswith("/byteorder"):
                archive.writestr(name, raw)
    assert open_checkpoint(path).sources.keys() == {"a"}
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
    try:
        with pytest.raises(CheckpointError, match="big-endian"):
            open_checkpoint(path)
    finally:
        torch.serialization.set_default_load_endianness(None)


def test_damaged_files_are_refused_or_read_as_torch_does(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(odd_tensors(), path)
    whole = path.read_bytes()
    draw = random.Random(1)
    read = 0
    for number in range(120):
        raw = bytearray(whole)
        if number % 3 == 0:
            raw = raw[: draw.randrange(len(raw))]
        else:
            # Half of them in the pickle or the directory, which are near both ends.
            last = len(raw) if number % 3 == 1 else 3000
            at = len(raw) - 1 - draw.randrange(last)
            raw[at] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        try:
            found = open_checkpoint(path).sources
        except CheckpointError:
            continue
        read += 1
        for source in found.values():
            assert all(0 <= e.offset <= e.offset + e.size_bytes <= len(raw) for e in source.extents)
            assert len(bytes_of(source)) == source.size_bytes
    assert 0 < read < 120


def stacked() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))).eval()


def skeleton() -> nn.Sequential:
    with torch.device("meta"):
        return stacked()


@pytest.mark.parametrize("form", ["file", "folder", "shards"])
def test_models_are_compiled_from_them_in_place(tmp_path: Path, form: str) -> None:
    model, x = stacked(), torch.randn(2, _WIDTH)
    folder, state = tmp_path / "model", model.state_dict()
    folder.mkdir()
    names = sorted(state)
    parts = [names] if form != "shards" else [names[:2], names[2:]]
    files = ["pytorch_model.bin"] if form != "shards" else ["a.bin", "b.bin"]
    for file, part in zip(files, parts, strict=True):
        torch.save({name: state[name] for name in part}, folder / file)
    if form == "shards":
        weight_map = {n: file for file, part in zip(files, parts, strict=True) for n in part}
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"lr": 0.1}, folder / "optimizer.pt")
    given = folder / "pytorch_model.bin" if form == "file" else folder
    cache = tmp_path / "cache"
    with gascompile.compile(
        skeleton(),
        3 * 4 * _WIDTH * _WIDTH,
        (x,),
        checkpoint=given,
        machine="cpu-nvme",
        cache_dir=cache,
    ) as compiled:
        assert torch.equal(compiled(x), model(x))
        # Again: it has to be read as it is then.
        os.utime(folder / files[-1], ns=(1, 1))
        with pytest.raises(StorageError, match=files[-1]):
            compiled(x)
    assert not list(cache.glob("store/*"))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(CheckpointError, match=r"names the shard pytorch_model-00001-of-00002\.bin"):
        open_checkpoint(tmp_path)


def test_steps_are_trained_from_them(tmp_path: Path) -> None:
    model = stacked().train()
    torch.save({"model": model.state_dict(), "epoch": 1}, tmp_path / "last.pt")
    found = skeleton().train()
    with gascompile.compile_step(
        found,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(found.parameters(), lr=0.1),
        "64MiB",
        torch.ones(2, _WIDTH),
        checkpoint=tmp_path / "last.pt",
        machine="cpu-nvme",
        cache_dir=tmp_path / "cache",
    ) as step:
        for name, value in step.state_dict()["model"].items():
            assert torch.equal(value, model.state_dict()[name]), name


def test_a_record_that_says_it_is_larger_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(64)}, path)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (info,) = (i for i in archive.infolist() if i.filename.endswith("data/0"))
    # The length of the name in the record's own header, which the directory does not have.
    struct.pack_into("<H", raw, info.header_offset + 26, 65000)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
