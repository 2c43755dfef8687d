"""Checkpoints that do not fit: a typed error that names the file, the weight and the numbers."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import gascompile
from gascompile.weights.checkpoint import open_checkpoint
from tests.integration.net import BUDGET, Build, Net


def rewrite(shard: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)


def test_missing_shard(checkpoint: Path, build: Build) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    with pytest.raises(
        gascompile.CheckpointError, match=r"names the shard model-1\.safetensors.*download"
    ):
        build()


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_shard(checkpoint: Path, build: Build, keep: int) -> None:
    shard = checkpoint / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(gascompile.CheckpointError, match=r"truncated|corrupt"):
        build()


def test_corrupt_header(checkpoint: Path, build: Build) -> None:
    shard = checkpoint / "model-0.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[20:24] = b"\xff\xfe\x00{"
    shard.write_bytes(raw)
    with pytest.raises(gascompile.CheckpointError, match=r"model-0\.safetensors has a corrupt"):
        build()


def test_header_whose_entries_are_no_entries(checkpoint: Path, build: Build) -> None:
    header = json.dumps({"layers.0.weight": 7}).encode()
    (checkpoint / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(gascompile.CheckpointError, match=r"layers\.0\.weight"):
        build()


def test_wrong_shape(checkpoint: Path, build: Build) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.weight"] = torch.zeros(1024, 512)

    rewrite(checkpoint / "model-0.safetensors", change)
    with pytest.raises(
        gascompile.CheckpointError,
        match=r"'layers.0.weight' has the shape \[1024, 512\].*\[1024, 1024\]",
    ):
        build()


def test_wrong_dtype(checkpoint: Path, build: Build) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.weight"] = tensors["layers.0.weight"].double()

    rewrite(checkpoint / "model-0.safetensors", change)
    with pytest.raises(
        gascompile.CheckpointError, match=r"dtype float64.*needs float32.*model\.to"
    ):
        build()


def test_missing_weight(checkpoint: Path, build: Build) -> None:
    rewrite(
        checkpoint / "model-0.safetensors", lambda tensors: tensors.__delitem__("layers.1.bias")
    )
    with pytest.raises(gascompile.CheckpointError, match=r"lacks 1 weights.*'layers\.1\.bias'"):
        build()


def test_extra_weight(checkpoint: Path, build: Build) -> None:
    rewrite(
        checkpoint / "model-0.safetensors",
        lambda tensors: tensors.update({"layers.99.bias": torch.zeros(3)}),
    )
    with pytest.raises(
        gascompile.CheckpointError,
        match=r"holds 1 weights that the model does not have.*'layers\.99\.bias'",
    ):
        build()


def test_no_checkpoint_for_a_meta_model(cache: Path, inputs: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        skeleton = Net().eval()
    with pytest.raises(gascompile.CheckpointError, match="pass checkpoint="):
        gascompile.compile(skeleton, BUDGET, example_inputs=inputs, cache_dir=cache)


def test_file_replaced_after_planning(
    checkpoint: Path, build: Build, inputs: dict[str, torch.Tensor]
) -> None:
    compiled = build()
    compiled(**inputs)
    shard = checkpoint / "model-1.safetensors"
    copy = checkpoint / "new"
    shutil.copy(shard, copy)
    os.utime(copy, ns=(1, 1))
    copy.replace(shard)
    with pytest.raises(gascompile.StorageError, match=r"model-1\.safetensors"):
        compiled(**inputs)


@pytest.mark.parametrize(("begin", "fault"), [(8, "another has as well"), (24, "bytes of none")])
def test_weights_that_overlap_or_leave_bytes_out(tmp_path: Path, begin: int, fault: str) -> None:
    entries = {"a": (0, 16), "b": (begin, 40)}
    header = {
        name: {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}
        for name, (start, stop) in entries.items()
    }
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(40))
    with pytest.raises(SafetensorError), safe_open(str(file), "np"):
        pass
    with pytest.raises(gascompile.CheckpointError, match=f"'b' begins at byte {begin} .*{fault}"):
        open_checkpoint(file)
