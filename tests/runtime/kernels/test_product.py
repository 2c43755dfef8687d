"""Products with packed and plain weights against float64, of one row and of several, whole and divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.formats.layout import GROUPS
from gascompile.formats.quantize import pack
from gascompile.runtime.kernels import reference
from gascompile.runtime.kernels.checks import DTYPES
from gascompile.runtime.kernels.product import linear
from gascompile.runtime.kernels.tiling import choose_tiling

FORMS = (None, "int8", "int9", "int10", "int12", "int4")


def packed_and_exact(
    weight: torch.Tensor, form: str | None, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in ``form``, and the values that it then stands for."""
    if form is None:
        return weight, weight.double()
    packed = pack(weight.cpu(), form, group).to(weight.device)
    values = torch.empty(weight.shape, device=weight.device)
    reference.unpack(packed, values, form=form, group=group)
    return packed, values.double()


def worst(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((result.double() - expected).abs().max() / expected.abs().max())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(FORMS),
    rows=st.sampled_from([1, 1, 2, 3, 7, 16]),
    outputs=st.integers(1, 30),
    columns=st.integers(1, 300),
    group=st.sampled_from(GROUPS),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_random_shapes(
    device: torch.device,
    form: str | None,
    rows: int,
    outputs: int,
    columns: int,
    group: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    if form == "int4":
        columns = -(-columns // group) * group
    x = torch.randn(rows, columns, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if has_bias else None
    weight, values = packed_and_exact(
        torch.randn(outputs, columns, device=device).to(dtype), form, group
    )
    result = torch.full((rows, outputs), 7.0, device=device)
    linear(x, weight, bias, result, form=form, group=group)
    expected = x.double() @ values.T + (bias.double() if bias is not None else 0)
    assert worst(result, expected) < 1e-3
    by_reference = torch.empty_like(result)
    reference.linear(x, weight, bias, by_reference, form=form, group=group)
    assert worst(by_reference, expected) < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_divided_columns(device: torch.device, form: str | None, rows: int) -> None:
    """Few outputs of many columns are summed in parts; the last part is shorter, and the bias added once."""
    # One row is divided later than several are.
    columns = (20_000 if rows == 1 else 4_000) + {None: 0, "int4": 32}.get(form, 10)
    tiling = choose_tiling(rows, 3, columns, form=form, group=32)
    assert tiling.parts > 1 and columns % tiling.part_columns
    x = torch.randn(rows, columns, device=device)
    bias = torch.full((3,), 1000.0, device=device)
    weight, values = packed_and_exact(torch.randn(3, columns, device=device), form, 32)
    result = torch.empty(rows, 3, device=device)
    linear(x, weight, bias, result, form=form, group=32)
    expected = x.double() @ values.T + 1000
    assert float((result.double() - expected).abs().max()) < 0.01
    again = torch.empty_like(result)
    linear(x, weight, bias, again, form=form, group=32)
    assert torch.equal(result, again)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_outputs_are_the_sums_rounded(
    device: torch.device, form: str | None, rows: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, 256, device=device).to(dtype)
    weight, values = packed_and_exact(torch.randn(11, 256, device=device).to(dtype), form, 64)
    result = torch.empty(rows, 11, device=device, dtype=dtype)
    linear(x, weight, None, result, form=form, group=64)
    expected = x.double() @ values.T
    step = torch.finfo(dtype).eps
    assert worst(result, expected) < step


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_apart_and_what_lies_between_them(
    device: torch.device, form: str | None, rows: int
) -> None:
    """Neither what lies beside ``x`` and the weight nor what lies behind their last rows is used."""
    columns = 96
    weight, values = packed_and_exact(torch.randn(9, columns, device=device), form, 32)
    fill = float("nan") if form is None else 255
    area = torch.full((11, weight.shape[1] + 16), fill, dtype=weight.dtype, device=device)
    area[1:10, : weight.shape[1]] = weight
    wide = torch.full((rows + 1, columns + 7), float("nan"), device=device)
    wide[:rows, 3 : columns + 3] = torch.randn(rows, columns)
    x = wide[:rows, 3 : columns + 3]
    result = torch.empty(rows, 9, device=device)
    linear(x, area[1:10, : weight.shape[1]], None, result, form=form, group=32)
    assert worst(result, x.double() @ values.T) < 1e-5
