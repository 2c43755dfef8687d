"""Pieces of tensors in files: ranges as boxes, by brute force over all elements; files that say what cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gascompile import CheckpointError
from gascompile.training.state.pieces import (
    PIECES,
    Files,
    Stored,
    TensorPiece,
    boxes,
    named,
    run_of,
    stored_in,
    table_text,
)

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@given(SHAPES, st.data())
def test_boxes_are_the_elements_of_a_range_in_their_order(
    shape: list[int], data: st.DataObject
) -> None:
    count = math.prod(shape)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2)))
    every = torch.arange(count).reshape(shape)
    seen: list[int] = []
    for offsets, sizes in boxes(shape, begin, end):
        piece = TensorPiece(offsets=offsets, sizes=sizes, file=Path(), at=0)
        seen += every[piece.slices].reshape(-1).tolist()
        assert run_of(shape, piece) == seen[-math.prod(sizes)]
    assert seen == list(range(begin, end))
    assert len(boxes(shape, begin, end)) <= max(2 * len(shape) - 1, 1)


def write(
    path: Path, *parts: tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]
) -> list[Path]:
    """Write boxes of ``parts``: name, values, first element and shape of the tensor."""
    rows = {
        named(name, shape, first)[0]: (name, list(first), list(shape))
        for name, _, first, shape in parts
    }
    tensors = {named(n, shape, first)[0]: value.contiguous() for n, value, first, shape in parts}
    save_file(tensors, path, metadata={PIECES: table_text(rows)})
    return [path]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 25), st.data())
def test_files_give_any_range_back(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, cut: int, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("pieces")
    every, cut = torch.randn(rows, columns), min(cut, rows * columns)
    files = []
    for number, (begin, end) in enumerate([(0, cut), (cut, rows * columns)]):
        found = [
            (
                "a",
                every[TensorPiece(offsets=o, sizes=s, file=Path(), at=0).slices],
                o,
                (rows, columns),
            )
            for o, s in boxes((rows, columns), begin, end)
        ]
        files += write(tmp_path / f"{number}.safetensors", *found) if found else []
    (stored,) = stored_in(files).values()
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, rows * columns)] * 2)))
    part, whole = torch.empty(end - begin), torch.empty(rows, columns)
    with Files() as opened:
        opened.part(stored, begin, part)
        opened.whole(stored, whole)
    assert torch.equal(part, every.reshape(-1)[begin:end])
    assert torch.equal(whole, every)
    assert stored.has(begin, end)


def test_columns_are_no_runs_and_are_read_all_the_same(tmp_path: Path) -> None:
    every = torch.randn(4, 6)
    files = write(
        tmp_path / "a.safetensors",
        ("a", every[:, :2], (0, 0), (4, 6)),
        ("a", every[:, 2:], (0, 2), (4, 6)),
    )
    stored = stored_in(files)["a"]
    assert stored.runs is None
    part = torch.empty(7)
    with Files() as opened:
        opened.part(stored, 5, part)
    assert torch.equal(part, every.reshape(-1)[5:12])


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 0), (5, 3))],  # a hole
        [((0, 0), (4, 3)), ((1, 0), (4, 3))],  # twice
        [((3, 0), (4, 3))],  # beyond it
        [((0, 0), (4, 3)), ((2, 0), (5, 3))],  # of different shapes
    ],
)
def test_what_is_not_whole_is_refused(parts: list[Any], tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{n}.safetensors", ("a", ONES, first, shape))[0]
        for n, (first, shape) in enumerate(parts)
    ]
    with pytest.raises(CheckpointError, match=r"is not whole|of another tensor"):
        stored_in(files)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        '{"a":1}',
        '{"a":["a",[0],[2,3]]}',
        '{"a":["a",[-1,0],[2,3]]}',
        '{"a":["a",[0,0],[true,3]]}',
        '{"a":[1,[0,0],[2,3]]}',
        '{"a":["a",[0],[2]]}',
        '{"a":["a",[0,0],[1000000000000000000000,3]]}',
    ],
)
def test_wrong_tables_are_refused(text: str, tmp_path: Path) -> None:
    save_file({"a": ONES}, tmp_path / "a.safetensors", metadata={PIECES: text})
    with pytest.raises(CheckpointError):
        stored_in([tmp_path / "a.safetensors"])


def test_what_is_there_in_part_says_what_it_has(tmp_path: Path) -> None:
    files = write(tmp_path / "a.safetensors", ("a", ONES, (2, 0), (5, 3)))
    (stored,) = stored_in(files, whole=False).values()
    assert [stored.has(*span) for span in ((6, 12), (5, 12), (6, 13), (3, 3))] == [
        True,
        False,
        False,
        True,
    ]
    assert isinstance(stored, Stored)
