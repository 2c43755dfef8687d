"""Headers of GGUF files: what the ``gguf`` package writes and reads, and files that are none."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from gascompile.core.errors import CheckpointError
from gascompile.formats.layout import BLOCKS
from gascompile.weights.checkpoint import header_digest, open_checkpoint
from gascompile.weights.gguf import read_gguf_header
from tests.gguf_files import TYPES, random_blocks

KINDS = gguf.GGMLQuantizationType


def write(path: Path, change: Callable[[gguf.GGUFWriter], Any] = lambda _: None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "", "d" * 70_000])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.5])
    writer.add_float32("llama.rope.freq_base", 1e4)
    for form in BLOCKS:
        rows = random_blocks(form, 3, 512).numpy()
        writer.add_tensor(f"blk.0.{form}.weight", rows, raw_dtype=TYPES[form])
    writer.add_tensor("half", torch.ones(5, 3).half().numpy())
    writer.add_tensor("full", torch.ones(7).numpy())
    raw = torch.ones(2, 8).bfloat16().view(torch.uint8).numpy()
    writer.add_tensor("brain", raw, raw_dtype=KINDS.BF16)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    found = read_gguf_header(file)
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert found.sources.keys() == wanted.keys()
    for name, source in found.sources.items():
        (extent,) = source.extents
        assert extent.offset == wanted[name].data_offset
        assert extent.size_bytes == wanted[name].n_bytes
        assert source.shape == tuple(reversed(wanted[name].shape.tolist()))
    dtypes = {name: source.dtype for name, source in found.sources.items()}
    plain = {"half": "float16", "full": "float32", "brain": "bfloat16"}
    assert dtypes == plain | {f"blk.0.{form}.weight": form for form in BLOCKS}
    assert found.metadata["llama.block_count"] == 3
    assert found.metadata["general.architecture"] == "llama"
    assert "tokenizer.ggml.tokens" not in found.metadata
    assert open_checkpoint(tmp_path) == open_checkpoint(file)
    assert header_digest(file) == found.stamp.digest


def test_an_alignment_of_ones_own(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", lambda writer: writer.add_custom_alignment(4096))
    offsets = {t.name: t.data_offset for t in gguf.GGUFReader(file).tensors}
    assert {n: s.extents[0].offset for n, s in read_gguf_header(file).sources.items()} == offsets


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    return str(caught.value)


def test_other_types_and_parts_are_refused_with_advice(tmp_path: Path) -> None:
    def q5(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("x", torch.zeros(1, 22).byte().numpy(), raw_dtype=KINDS.Q5_0)

    assert "the type Q5_0" in refusal(write(tmp_path / "q5.gguf", q5))
    assert "llama-quantize" in refusal(tmp_path / "q5.gguf")
    parts = write(tmp_path / "parts.gguf", lambda writer: writer.add_uint16("split.count", 3))
    assert "--merge" in refusal(parts)
    assert "2 .gguf files" in refusal(tmp_path)


def test_every_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "model.gguf").read_bytes()
    used = max(
        s.extents[0].offset + s.extents[0].size_bytes
        for s in read_gguf_header(tmp_path / "model.gguf").sources.values()
    )
    short = tmp_path / "short.gguf"
    for size in (*range(4, 300), *range(300, used, 997), used - 1):
        short.write_bytes(raw[:size])
        refusal(short)
    short.write_bytes(raw[:used])
    assert open_checkpoint(short).sources


def replaced(raw: bytes, begin: int, form: str, value: int) -> bytes:
    return raw[:begin] + struct.pack(form, value) + raw[begin + struct.calcsize(form) :]


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "model.gguf").read_bytes()
    name = raw.index(b"half") + len(b"half")
    entry = raw[name : name + 32]
    assert struct.unpack("<IQQIQ", entry) == (2, 3, 5, 1, struct.unpack("<Q", entry[-8:])[0])
    odd = {
        "a version": (4, "<I", 1),
        "numbers of the other order": (4, "<I", 3 << 24),
        "tensors": (8, "<Q", (1 << 64) - 1),
        "pairs": (16, "<Q", 1 << 62),
        "dimensions": (name, "<I", 1 << 31),
        "no dimensions": (name, "<I", 0),
        "columns": (name + 4, "<Q", 1 << 63),
        "no rows": (name + 12, "<Q", 0),
        "rows": (name + 12, "<Q", 6),
        "more rows": (name + 12, "<Q", 1 << 39),
        "a type": (name + 20, "<I", 77),
        "an offset": (name + 24, "<Q", (1 << 64) - 32),
        "one that is not aligned": (name + 24, "<Q", 33),
        "another's": (name + 24, "<Q", 0),
    }
    file = tmp_path / "odd.gguf"
    for change in odd.values():
        file.write_bytes(replaced(raw, *change))
        refusal(file)
    twice = raw.replace(b"half", b"full")
    file.write_bytes(twice)
    assert "'full' twice" in refusal(file)
    nested = (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    )
    file.write_bytes(nested + struct.pack("<IQ", 9, 1) * 1000)
    assert "type 9" in refusal(file)
    file.write_bytes(nested + struct.pack("<IQ", 8, 1 << 30))
    os.truncate(file, 1 << 40)
    assert "a list of 1073741824 items" in refusal(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    refusal(pipe)
    refusal(tmp_path)
    with pytest.raises(CheckpointError):
        read_gguf_header(pipe)
    with pytest.raises(CheckpointError):
        read_gguf_header(tmp_path / "nothing.gguf")
