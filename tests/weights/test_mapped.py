"""Weights of a model in memory that are maps of safetensors files: read from those, unless anything else is true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gascompile
from gascompile.core.errors import StorageError
from gascompile.core.sources import WeightSource
from gascompile.weights.mapped import mapped_weights

_WIDTH = 192


def bytes_at(source: WeightSource) -> bytes:
    with open(source.extents[0].path, "rb") as stream:
        stream.seek(source.extents[0].offset)
        return stream.read(source.extents[0].size_bytes)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    values = {f"{i}.weight": torch.randn(_WIDTH, _WIDTH) for i in range(3)}
    save_file({**values, "odd": torch.randn(7).to(torch.bfloat16)}, path)
    return load_file(path)


def model_of(tensors: dict[str, torch.Tensor]) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3)))
    model.load_state_dict({k: v for k, v in tensors.items() if k != "odd"}, assign=True)
    model.eval()
    return model


def test_maps_are_found_with_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    tensors = loaded(tmp_path / "model.safetensors")
    tensors["rows"] = tensors["1.weight"][3:7]
    tensors["gaps"] = tensors["1.weight"].t()
    tensors["own"] = torch.randn(5)
    tensors["copy"] = tensors["0.weight"].clone()
    found = mapped_weights(tensors).sources
    assert set(found) == set(tensors) - {"gaps", "own", "copy"}
    for name, source in found.items():
        raw = tensors[name].view(torch.uint8).numpy().tobytes()
        assert bytes_at(source) == raw
        assert source.shape == tuple(tensors[name].shape)


def test_a_tensor_that_was_written_to_is_no_file(tmp_path: Path) -> None:
    tensors = loaded(tmp_path / "model.safetensors")
    tensors["1.weight"][-1, -1] = 5.0
    found = mapped_weights(tensors).sources
    assert "1.weight" not in found
    # A page holds the end of one tensor and the beginning of the next, which is then not proven either.
    assert found.keys() & {"0.weight", "2.weight"}


@pytest.mark.parametrize("change", ["replaced", "removed", "renamed", "no safetensors"])
def test_a_file_that_is_not_the_mapped_one_any_more_is_left_alone(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = loaded(path)
    if change == "replaced":
        save_file({"other": torch.randn(4)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
    elif change == "removed":
        path.unlink()
    elif change == "renamed":
        path.rename(tmp_path / "model.bin")
    else:
        with path.open("r+b") as stream:
            stream.write(b"\xff" * 8)
    assert not mapped_weights(tensors).sources


def test_a_loaded_model_is_compiled_without_a_copy(tmp_path: Path) -> None:
    model = model_of(loaded(tmp_path / "model.safetensors"))
    x = torch.randn(2, _WIDTH)
    budget = 6 * _WIDTH * _WIDTH
    with gascompile.compile(model, budget, (x,), cache_dir=tmp_path / "cache") as compiled:
        assert {e.path for s in compiled.weights.sources.values() for e in s.extents} == {
            str(tmp_path / "model.safetensors")
        }
        assert torch.equal(compiled(x), model(x))
    assert not list((tmp_path / "cache").glob("store/*.safetensors"))


def test_what_was_changed_after_loading_is_what_runs(tmp_path: Path) -> None:
    model = model_of(loaded(tmp_path / "model.safetensors"))
    x = torch.randn(2, _WIDTH)
    with torch.no_grad():
        next(model[1].parameters()).mul_(-3.0)
    with gascompile.compile(model, "1MiB", (x,), cache_dir=tmp_path / "cache") as compiled:
        assert torch.equal(compiled(x), model(x))


def test_a_file_that_is_written_to_later_ends_the_call(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = model_of(loaded(path))
    x = torch.randn(2, _WIDTH)
    with gascompile.compile(model, "1MiB", (x,), cache_dir=tmp_path / "cache") as compiled:
        compiled(x)
        with path.open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(b"abcd")
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            compiled(x)
