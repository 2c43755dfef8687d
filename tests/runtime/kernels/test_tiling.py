"""How products are divided: everything is covered once, and the GPU is occupied where there is work for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.runtime.kernels.tiling import TARGET_PROGRAMS, choose_tiling


@given(
    rows=st.integers(1, 16),
    outputs=st.integers(1, 200_000),
    columns=st.integers(1, 60_000),
    form=st.sampled_from([None, "int8", "int10", "int4"]),
    group=st.sampled_from([16, 32, 64, 128]),
)
def test_parts_cover_the_columns_once(
    rows: int, outputs: int, columns: int, form: str | None, group: int
) -> None:
    tiling = choose_tiling(rows, outputs, columns, form=form, group=group)
    assert (tiling.parts - 1) * tiling.part_columns < columns <= tiling.parts * tiling.part_columns
    assert tiling.part_columns % tiling.block_columns == 0
    for block in (tiling.block_outputs, tiling.block_columns):
        assert block & (block - 1) == 0
    if form is not None:
        assert tiling.block_columns % group == 0
    if rows > 1:
        assert tiling.block_outputs >= 16 and tiling.block_columns >= 32
    assert tiling.workspace_bytes == (4 * tiling.parts * rows * outputs if tiling.parts > 1 else 0)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("outputs", "columns"), [(1024, 4096), (4096, 4096), (4096, 14336), (128256, 4096)]
)
def test_shapes_of_an_8b_model_occupy_the_gpu(rows: int, outputs: int, columns: int) -> None:
    tiling = choose_tiling(rows, outputs, columns, form="int8", group=64)
    programs = -(-outputs // tiling.block_outputs) * tiling.parts
    assert programs >= TARGET_PROGRAMS * 0.9


def test_large_products_are_not_divided_and_need_no_workspace() -> None:
    tiling = choose_tiling(16, 128256, 4096, form=None)
    assert (tiling.parts, tiling.workspace_bytes, tiling.block_outputs) == (1, 0, 64)
