"""Tied weights that a checkpoint has twice: the same bytes, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.core.errors import CheckpointError
from gascompile.core.sources import WeightSource
from gascompile.training.compile_step import compile_step
from gascompile.weights import tied
from gascompile.weights.checkpoint import open_checkpoint
from gascompile.weights.matching import match_weights

NAMES = ("table.weight", "head.weight")
SHAPE = (70, 24)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(*SHAPE)
        self.head = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids))
        return found


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with nothing compared, and with several blocks to a weight, of which ends lie within a row."""
    monkeypatch.setattr(tied, "_known_equal", set())
    monkeypatch.setattr(tied, "_BLOCK_BYTES", 1000)


def written(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    table = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    both = {NAMES[0]: table, NAMES[1]: table.clone()}
    for at, value in changed.get("at", {}).items():
        both[NAMES[1]].view(-1)[at] = value
    save_file(both, folder / "model.safetensors")
    return folder / "model.safetensors"


def matched(file: Path, store: Path | None = None) -> Mapping[str, Any]:
    return match_weights(
        {NAMES[0]: ("float32", SHAPE)},
        open_checkpoint(file),
        names={NAMES[0]: NAMES},
        where=str(file),
        store=store,
    )


@pytest.mark.parametrize("at", [0, 249, 250, SHAPE[0] * SHAPE[1] - 1])
def test_entries_that_differ_in_one_value_are_refused(at: int, tmp_path: Path) -> None:
    file = written(tmp_path / "m", at={at: 7.0})
    with pytest.raises(
        CheckpointError, match=r"(?s)'table.weight' and 'head.weight'.*tie_word_emb"
    ):
        matched(file, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_every_way_to_a_checkpoint_refuses(tmp_path: Path) -> None:
    file = written(tmp_path / "m", at={5: 7.0})
    with torch.device("meta"):
        model = Model()
    ids = torch.tensor([[3, 69]])
    with pytest.raises(CheckpointError, match="other values"):
        gascompile.compile(
            model.eval(), None, (ids,), file, machine="emulated", cache_dir=tmp_path / "c"
        )
    with pytest.raises(CheckpointError, match="other values"):
        compile_step(
            model.train(),
            lambda m, x: m(x).sum(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            "1GiB",
            checkpoint=file,
            machine="cpu-nvme",
            cache_dir=tmp_path / "c",
        )
    with pytest.raises(CheckpointError, match="other values"):
        gascompile.export(model.eval(), tmp_path / "m.onnx", (ids,), checkpoint=file)


def test_large_ones_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, store = written(tmp_path / "m"), tmp_path / "store"
    assert matched(file, store)[NAMES[0]].extents == open_checkpoint(file).sources[NAMES[0]].extents
    reads: list[str] = []
    blocks = tied._blocks

    def heard(source: WeightSource) -> Iterator[bytes]:
        reads.append(source.name)
        return blocks(source)

    monkeypatch.setattr(tied, "_blocks", heard)
    matched(file, store)
    monkeypatch.setattr(tied, "_known_equal", set())  # as in another process
    matched(file, store)
    assert not reads
    written(tmp_path / "m", at={1: 7.0})
    with pytest.raises(CheckpointError, match="other values"):
        matched(file, store)
    assert reads == list(NAMES)
    (store / tied.NOTES).write_text("{")
    written(tmp_path / "m")
    matched(file, store)
    assert len(reads) == 4


def test_one_place_for_both_names_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.zeros(SHAPE)
    torch.save({NAMES[0]: table, NAMES[1]: table}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(tied, "_blocks", None)
    assert matched(tmp_path / "pytorch_model.bin").keys() == {NAMES[0]}


def test_another_shape_under_the_second_name_is_refused(tmp_path: Path) -> None:
    both = {NAMES[0]: torch.zeros(SHAPE), NAMES[1]: torch.zeros(SHAPE[::-1])}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'table\.weight' has the shape"):
        matched(tmp_path / "model.safetensors")


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "m")
    found = open_checkpoint(file)
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="become shorter"):
        match_weights(
            {NAMES[0]: ("float32", SHAPE)}, found, names={NAMES[0]: NAMES}, where=str(file)
        )
