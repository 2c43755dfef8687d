"""Unpacking by the kernels: equal to the reference bit for bit, and to nothing beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.formats.layout import GROUPS, LOW_BITS
from gascompile.formats.quantize import pack
from gascompile.runtime.kernels import reference
from gascompile.runtime.kernels.checks import DTYPES
from gascompile.runtime.kernels.dequantise import unpack

COLUMNS = st.one_of(st.integers(1, 40), st.sampled_from([127, 513, 1025, 2050]))
EXAMPLES = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(packed: torch.Tensor, columns: int, dtype: torch.dtype, form: str, group: int) -> None:
    """Unpack by kernel and by reference and compare."""
    result = torch.full((packed.shape[0], columns), 7.0, dtype=dtype, device=packed.device)
    expected = torch.empty_like(result)
    unpack(packed, result, form=form, group=group)
    reference.unpack(packed, expected, form=form, group=group)
    assert torch.equal(result, expected)


@EXAMPLES
@given(
    rows=st.integers(1, 9),
    columns=COLUMNS,
    form=st.sampled_from(list(LOW_BITS)),
    group=st.sampled_from(GROUPS),
    dtype=st.sampled_from(DTYPES),
)
def test_signed_forms(
    device: torch.device, rows: int, columns: int, form: str, group: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(rows, columns)
    check(pack(weight, form, group).to(device), columns, dtype, form, group)


@EXAMPLES
@given(
    rows=st.integers(1, 9),
    groups=st.sampled_from([1, 2, 3, 7, 33]),
    group=st.sampled_from(GROUPS),
    dtype=st.sampled_from(DTYPES),
)
def test_int4(device: torch.device, rows: int, groups: int, group: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, groups * group)
    check(pack(weight, "int4", group).to(device), groups * group, dtype, "int4", group)


@pytest.mark.parametrize(("form", "columns"), [("int8", 101), ("int10", 101), ("int4", 96)])
def test_rows_within_a_staging_area(device: torch.device, form: str, columns: int) -> None:
    """Some rows of a weight, at an address that only the scales' own alignment fits, rows further apart."""
    packed = pack(torch.randn(40, columns), form, 32).to(device)
    staging = torch.full((40, packed.shape[1] + 20), 255, dtype=torch.uint8, device=device)
    staging = staging.view(-1)[4:-16].view(-1)
    area = staging.as_strided(
        (39, packed.shape[1]), (packed.shape[1] + 20, 1), staging.storage_offset()
    )
    area.copy_(packed[1:])
    check(area[3:31], columns, torch.bfloat16, form, 32)


@pytest.mark.parametrize("form", ["int8", "int9", "int12", "int4"])
def test_every_byte_is_understood(device: torch.device, form: str) -> None:
    """Bytes as they may come, -128 included, which packing does not write."""
    rows = torch.arange(256, dtype=torch.uint8, device=device).repeat(2, 2)
    weight = torch.randn(2, 1024 if form == "int4" else 512)
    packed = pack(weight, form, 32).to(device)
    packed[:, :512] = rows
    if form in ("int9", "int12"):
        packed[:, 512:576] = rows[:, :64]
    check(packed, weight.shape[1], torch.float32, form, 32)
