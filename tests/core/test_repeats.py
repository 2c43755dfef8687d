"""Which tensors have several elements in one place."""

from __future__ import annotations

import itertools

import torch

from gascompile.core.strides import repeats


def test_against_all_places() -> None:
    for shape in itertools.product((0, 1, 2, 3), repeat=3):
        for stride in itertools.product((0, 1, 2, 3, 5, 7), repeat=3):
            count = shape[0] * shape[1] * shape[2]
            numbers = torch.arange(64).as_strided(shape, stride)
            assert repeats(shape, stride) is (numbers.unique().numel() < count), (shape, stride)


def test_large_ones_take_no_time() -> None:
    assert not repeats((1 << 20, 1 << 20), (1 << 20, 1))
    assert repeats((1 << 20, 1 << 20), (0, 1))
