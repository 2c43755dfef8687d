"""The layout of packed rows, against sizes added by hand and rules that hold for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.formats.layout import (
    FORMS,
    GROUPS,
    GROUPS_PER_STEP,
    ROW_ALIGNMENT,
    packed_parts,
    row_bytes,
)


def test_int8_row_by_hand() -> None:
    parts = packed_parts("int8", 100, 32)
    assert (parts.values_bytes, parts.low_bytes) == (100, 0)
    assert (parts.scales_offset, parts.num_scales) == (100, 4)
    assert (parts.steps_offset, parts.num_steps, parts.minima_offset) == (102, 1, None)
    assert (parts.used_bytes, parts.row_bytes) == (104, 112)


def test_int10_row_by_hand() -> None:
    parts = packed_parts("int10", 2050, 16)
    assert (parts.values_bytes, parts.low_bytes) == (2050, 513)
    assert (parts.scales_offset, parts.num_scales) == (2563, 129)
    assert (parts.steps_offset, parts.num_steps) == (2628, 9)
    assert (parts.used_bytes, parts.row_bytes) == (2646, 2656)


def test_steps_of_an_odd_row_are_aligned() -> None:
    parts = packed_parts("int8", 14, 64)
    assert (parts.scales_offset, parts.steps_offset, parts.row_bytes) == (14, 16, 32)


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
    bits = int(form.removeprefix("int"))
    assert (parts.values_bytes + parts.low_bytes) * 8 == columns * bits
    assert parts.num_scales == groups
    assert parts.scales_offset == parts.values_bytes + parts.low_bytes
    if form == "int4":
        assert parts.scales_offset % 2 == 0 and parts.steps_offset is None
        assert parts.minima_offset == parts.scales_offset + 2 * groups
        assert parts.used_bytes == parts.minima_offset + 2 * groups
    else:
        assert parts.steps_offset is not None and parts.minima_offset is None
        assert parts.steps_offset % 2 == 0
        assert 0 <= 2 * (parts.steps_offset - parts.scales_offset) - groups < 4
        assert (parts.num_steps - 1) * GROUPS_PER_STEP < groups <= parts.num_steps * GROUPS_PER_STEP
        assert parts.used_bytes == parts.steps_offset + 2 * parts.num_steps
    assert parts.row_bytes % ROW_ALIGNMENT == 0
    assert 0 <= parts.row_bytes - parts.used_bytes < ROW_ALIGNMENT
    assert row_bytes(form, columns, group) == parts.row_bytes


def test_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match="'int3' is no packed form; packed forms are int8, int9, "):
        packed_parts("int3", 64, 32)


def test_no_columns() -> None:
    with pytest.raises(ValueError, match="at least 1 column, not 0"):
        row_bytes("int8", 0, 64)


@pytest.mark.parametrize("form", FORMS)
def test_unknown_group(form: str) -> None:
    with pytest.raises(ValueError, match="groups of 16, 32, 64, 128 columns, not of 48"):
        row_bytes(form, 96, 48)


def test_group_that_does_not_divide_the_columns() -> None:
    with pytest.raises(ValueError, match="96 columns leave 32 beyond groups of 64"):
        row_bytes("int4", 96, 64)
