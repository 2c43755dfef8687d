"""The layout of packed rows, against sizes added by hand and rules that hold for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.packing import FORMS, GROUPS, ROW_ALIGNMENT, packed_parts, row_bytes


def test_int8_row_by_hand() -> None:
    parts = packed_parts("int8", 100, 32)
    assert (parts.values_bytes, parts.scales_offset, parts.num_scales) == (100, 100, 4)
    assert (parts.minima_offset, parts.used_bytes, parts.row_bytes) == (None, 108, 112)


def test_int8_scale_of_an_odd_row_is_aligned() -> None:
    parts = packed_parts("int8", 13, 64)
    assert (parts.scales_offset, parts.used_bytes, parts.row_bytes) == (14, 16, 16)


def test_int4_row_by_hand() -> None:
    parts = packed_parts("int4", 4096, 64)
    assert (parts.values_bytes, parts.scales_offset, parts.num_scales) == (2048, 2048, 64)
    assert (parts.minima_offset, parts.used_bytes, parts.row_bytes) == (2176, 2304, 2304)


@given(form=st.sampled_from(FORMS), group=st.sampled_from(GROUPS), groups=st.integers(1, 300))
def test_parts_follow_each_other_aligned_and_padded_by_less_than_the_alignment(
    form: str, group: int, groups: int
) -> None:
    columns = group * groups
    parts = packed_parts(form, columns, group)
    width = 2
    assert parts.values_bytes * (1 if form == "int8" else 2) == columns
    assert 0 <= parts.scales_offset - parts.values_bytes < width
    assert parts.scales_offset % width == 0
    scales_end = parts.scales_offset + parts.num_scales * width
    assert parts.used_bytes == (scales_end if form == "int8" else scales_end + groups * width)
    assert parts.minima_offset == (None if form == "int8" else scales_end)
    assert parts.row_bytes % ROW_ALIGNMENT == 0
    assert 0 <= parts.row_bytes - parts.used_bytes < ROW_ALIGNMENT
    assert row_bytes(form, columns, group) == parts.row_bytes


def test_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match="'int3' is no packed form; packed forms are int8, int4"):
        packed_parts("int3", 64, 32)


def test_no_columns() -> None:
    with pytest.raises(ValueError, match="at least 1 column, not 0"):
        row_bytes("int8", 0, 64)


@pytest.mark.parametrize("form", FORMS)
def test_unknown_group(form: str) -> None:
    with pytest.raises(ValueError, match="groups of 32, 64, 128 columns, not of 48"):
        row_bytes(form, 96, 48)


def test_group_that_does_not_divide_the_columns() -> None:
    with pytest.raises(ValueError, match="96 columns leave 32 beyond groups of 64"):
        row_bytes("int4", 96, 64)
