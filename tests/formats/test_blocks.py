"""Blocks of llama.cpp's files against the ``gguf`` package's own decoder, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gascompile.formats import ops as format_ops
from gascompile.formats.layout import BLOCKS, group_of, row_bytes
from gascompile.formats.workspace import decode_workspace_bytes, linear_workspace_bytes
from tests.allocator import peak_growth_bytes
from tests.gguf_files import oracle, random_blocks


@pytest.mark.parametrize("form", BLOCKS)
def test_values_are_those_of_the_gguf_package(
    form: str, kernels: format_ops.Kernels | None
) -> None:
    for columns in (256, 1280):
        rows = random_blocks(form, 37, columns)
        found = format_ops.decoded(rows, form, columns, group_of(form), torch.float32)
        assert torch.equal(found, oracle(rows, form))
        if kernels is not None:
            assert kernels.decode(torch.empty(37, columns), rows, form, group_of(form))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("form", BLOCKS)
def test_every_scale_is_understood(form: str, kernels: format_ops.Kernels | None) -> None:
    """All values of float16: subnormal ones, infinities and what is no number."""
    del kernels
    num_blocks = 1 << 16
    columns = num_blocks * BLOCKS[form][0] // 64
    rows = random_blocks(form, 64, columns)
    halves = torch.arange(num_blocks, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    at = 208 if form == "q6_k" else 0
    rows.view(-1, BLOCKS[form][1])[:, at : at + 2] = halves.view(-1, 2)
    found = format_ops.decoded(rows, form, columns, group_of(form), torch.float32)
    assert torch.equal(found.nan_to_num(nan=-1.5), oracle(rows, form).nan_to_num(nan=-1.5))


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_products_are_those_of_decoded_values(
    form: str, num_rows: int, kernels: format_ops.Kernels | None
) -> None:
    del kernels
    columns = 512
    rows = random_blocks(form, 45, columns)
    x = torch.randn(num_rows, columns)
    out = torch.empty(num_rows, 45)
    format_ops.linear_into(out, x, rows, form, group_of(form))
    values = oracle(rows, form).double()
    added = x.double().abs() @ values.abs().T
    assert bool(((out.double() - x.double() @ values.T).abs() <= 2e-6 * added).all())


@pytest.mark.parametrize("form", BLOCKS)
def test_no_more_memory_than_planned(form: str, kernels: format_ops.Kernels | None) -> None:
    columns, group = 1024, group_of(form)
    rows = random_blocks(form, 700, columns)
    x = torch.randn(40, columns)
    peak_bytes = peak_growth_bytes(partial(format_ops.LINEAR, x, rows, None, form, group))
    planned_bytes = linear_workspace_bytes(x, rows, form, group)
    assert peak_bytes <= planned_bytes + 40 * 700 * 4
    for dtype in (torch.float32, torch.bfloat16):
        peak_bytes = peak_growth_bytes(
            partial(format_ops.DECODE, rows, form, columns, group, dtype)
        )
        planned_bytes = decode_workspace_bytes(700, columns, form, group, dtype.itemsize)
        assert peak_bytes <= planned_bytes + 700 * columns * dtype.itemsize


def test_columns_that_are_no_blocks_are_refused() -> None:
    assert row_bytes("q4_k", 512, 256) == 288
    with pytest.raises(ValueError, match="blocks of 256 values"):
        row_bytes("q4_k", 384, 256)
    with pytest.raises(ValueError, match="packed by another version"):
        format_ops.decoded(torch.zeros(2, 35, dtype=torch.uint8), "q8_0", 32, 32, torch.float32)
