"""Copies out of staging: equal to torch's own casts, bit for bit."""

from __future__ import annotations

import pytest
import torch

from gascompile.runtime.kernels.cast import cast_copy
from gascompile.runtime.kernels.checks import DTYPES

PAIRS = [(source, out) for source in DTYPES for out in DTYPES]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bits, and take any NaN for any other."""
    both_nan = left.isnan() & right.isnan()
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return bool((both_nan | (left.view(bits) == right.view(bits))).all())


# The interpreter computes with numpy, which says where a cast ends at infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(("source", "out"), PAIRS)
def test_hard_values_are_rounded_as_torch_does(
    device: torch.device, source: torch.dtype, out: torch.dtype
) -> None:
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 2049.0, 65519.0, 65520.0, 3.4e38]
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-7, 6e-8, 2.9e-8]
    if device.type == "cuda" or torch.bfloat16 not in {source, out}:
        # The interpreter takes the subnormal numbers of bfloat16 for zero.
        special.append(1e-40)
    values = torch.tensor(ties + special, device=device).to(source)
    result = torch.empty(len(values), dtype=out, device=device)
    cast_copy(values, result)
    assert same(result, values.to(out))


@pytest.mark.parametrize(("source", "out"), PAIRS)
def test_rows_out_of_a_staging_area(
    device: torch.device, source: torch.dtype, out: torch.dtype
) -> None:
    """A matrix of odd size behind an odd number of elements, its rows further apart than they are long."""
    size = source.itemsize
    staging = torch.zeros(40 * 120 * size + 64, dtype=torch.uint8, device=device)
    area = staging[3 * size :][: 40 * 120 * size].view(source).view(40, 120)
    area.copy_(torch.randn(40, 120))
    matrix = area[1:38, 5:106]
    result = torch.full((37, 101), 7.0, dtype=out, device=device)
    cast_copy(matrix, result)
    assert same(result, matrix.to(out))


@pytest.mark.parametrize("shape", [(), (1,), (4097,), (3, 5, 7), (9000, 2), (2, 9001)])
def test_contiguous_shapes(device: torch.device, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape, device=device)
    result = torch.empty(shape, dtype=torch.bfloat16, device=device)
    cast_copy(source, result)
    assert same(result, source.bfloat16())


def test_nothing_beside_the_destination_is_written(device: torch.device) -> None:
    area = torch.full((300,), 7.0, device=device)
    cast_copy(torch.zeros(10, 13, device=device, dtype=torch.float16), area[100:230].view(10, 13))
    assert bool((area[:100] == 7).all() and (area[230:] == 7).all() and (area[100:230] == 0).all())
