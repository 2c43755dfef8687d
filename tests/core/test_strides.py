"""Normal strides: for ops, a tensor is the same as by the strides that it was given."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from gascompile.core.strides import contiguous_strides, normal_strides

_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


@st.composite
def _laid_out(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor whose dimensions lie in any order, with gaps, repeated, and of size 1 with any strides."""
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    if len(shape) in _CHANNELS_LAST and draw(st.booleans()):
        order = [*_CHANNELS_LAST[len(shape)]]
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim] * draw(st.sampled_from([1, 1, 2]))
    for dim, size in enumerate(shape):
        if size == 1:
            strides[dim] = draw(st.sampled_from([strides[dim], 0, 1, 5, 64]))
        elif draw(st.integers(0, 9)) == 0:
            strides[dim] = 0
    end = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return torch.arange(float(end)).as_strided(shape, strides)


def _results(value: torch.Tensor) -> list[torch.Tensor]:
    """Return what ops make of a tensor that look at its layout."""
    found = [torch.empty_like(value), value * 2, value.contiguous()]
    channels = value.shape[1] if value.dim() > 1 else 1
    kernel = torch.ones(2, channels, *[1] * (value.dim() - 2))
    if value.dim() == 4:
        pooled = functional.max_pool2d(value, 1), functional.interpolate(value, scale_factor=2.0)
        found += [functional.conv2d(value, kernel), *pooled]
    if value.dim() == 5:
        found += [functional.conv3d(value, kernel), functional.avg_pool3d(value, 1)]
    return found


@given(_laid_out())
def test_ops_lay_out_their_results_alike(value: torch.Tensor) -> None:
    shape, stride = tuple(value.shape), value.stride()
    normal = normal_strides(shape, stride)
    assert [b for n, b in zip(shape, normal, strict=True) if n > 1] == [
        a for n, a in zip(shape, stride, strict=True) if n > 1
    ]
    assert normal_strides(shape, normal) == normal
    same = value.as_strided(shape, normal)
    for found, wanted in zip(_results(same), _results(value), strict=True):
        assert normal_strides(tuple(found.shape), found.stride()) == normal_strides(
            tuple(wanted.shape), wanted.stride()
        )


def test_a_part_of_a_long_sequence_is_as_a_new_one() -> None:
    for tokens in (5, 9):
        last = torch.zeros(1, tokens, 8)[:, -1:]
        assert normal_strides((1, 1, 8), last.stride()) == contiguous_strides((1, 1, 8))
