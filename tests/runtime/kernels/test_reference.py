"""Packing against values worked out one by one, and against the error that rounding to nearest allows."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.packing import GROUPS
from gascompile.runtime.kernels import reference


def int8_by_hand(row: bytes, columns: int, group: int) -> list[float]:
    """Return the values of a packed row, read as the format's description says."""
    groups = -(-columns // group)
    raw = struct.unpack_from(f"<{groups}H", row, columns + columns % 2)
    # A bfloat16 is the upper half of a float32.
    scales = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in raw]
    return [q * scales[i // group] for i, q in enumerate(struct.unpack_from(f"<{columns}b", row))]


def int4_by_hand(row: bytes, columns: int, group: int) -> list[float]:
    """Return the values of a packed row, read as the format's description says."""
    scales = struct.unpack_from(f"<{columns // group}e", row, columns // 2)
    minima = struct.unpack_from(f"<{columns // group}e", row, columns // 2 + 2 * columns // group)
    values = []
    for column in range(columns):
        nibble = row[column // 2] >> 4 if column % 2 else row[column // 2] & 15
        values.append(nibble * scales[column // group] + minima[column // group])
    return values


def test_int8_row_by_hand() -> None:
    row = [1.0, -1.984375, 0.0] + [0.0] * 29 + [0.0, 127.0, 64.0]
    packed = reference.pack_int8(torch.tensor([row]), 32)
    assert packed.shape == (1, 48)
    assert packed[0, :3].view(torch.int8).tolist() == [64, -127, 0]
    assert packed[0, 32:35].view(torch.int8).tolist() == [0, 127, 64]
    assert packed[0, 36:40].view(torch.bfloat16).tolist() == [2.0**-6, 1.0]
    assert packed[0, 40:].tolist() == [0] * 8


def test_int4_row_by_hand() -> None:
    """From -1 to 6.5 in steps of 0.5 are exactly the sixteen values of a group."""
    weight = torch.tensor([[-1.0 + 0.5 * (column % 16) for column in range(32)]])
    packed = reference.pack_int4(weight)
    assert packed.shape == (1, 32)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]
    assert packed[0, 16:20].view(torch.float16).tolist() == [0.5, -1.0]
    out = torch.empty(1, 32)
    reference.unpack(packed, out, form="int4", group=32)
    assert torch.equal(out, weight)


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 150),
    group=st.sampled_from(GROUPS),
    seed=st.integers(0, 1000),
)
def test_int8_is_within_half_a_step_of_the_weight(
    rows: int, columns: int, group: int, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = reference.pack_int8(weight, group)
    out = torch.empty(rows, columns)
    reference.unpack(packed, out, form="int8", group=group)
    for row in range(rows):
        by_hand = int8_by_hand(bytes(packed[row].tolist()), columns, group)
        assert out[row].tolist() == pytest.approx(by_hand)
    for first in range(0, columns, group):
        part = slice(first, first + group)
        step = weight[:, part].abs().amax(dim=1, keepdim=True) / 127
        # bfloat16 keeps eight bits of a step.
        assert bool(((out - weight)[:, part].abs() <= step * 0.5 * (1 + 2**-8) + 1e-9).all())


@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    group=st.sampled_from(GROUPS),
    seed=st.integers(0, 1000),
)
def test_int4_is_near_the_weight(rows: int, groups: int, group: int, seed: int) -> None:
    columns = groups * group
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = reference.pack_int4(weight, group)
    out = torch.empty(rows, columns)
    reference.unpack(packed, out, form="int4", group=group)
    for row in range(rows):
        by_hand = int4_by_hand(bytes(packed[row].tolist()), columns, group)
        assert out[row].tolist() == pytest.approx(by_hand, abs=1e-6)
    spread = weight.unflatten(1, (groups, group))
    extent = spread.amax(dim=2) - spread.amin(dim=2)
    # Half a step, and what float16 loses of fifteen scales and of the minimum.
    allowed = extent / 30 + (extent + spread.abs().amax(dim=2)) * 2**-11
    assert bool(((out - weight).unflatten(1, (groups, group)).abs() <= allowed[:, :, None]).all())


def test_a_weight_larger_than_a_chunk_is_packed_row_by_row() -> None:
    weight = torch.randn(300, 8192)
    packed = reference.pack_int8(weight)
    assert torch.equal(packed[299:], reference.pack_int8(weight[299:]))
    out = torch.empty(300, 8192)
    reference.unpack(packed, out, form="int8", group=64)
    assert float((out - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_packed_from_their_values(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64).to(dtype)
    assert torch.equal(reference.pack_int8(weight), reference.pack_int8(weight.float()))
    assert torch.equal(reference.pack_int4(weight, 64), reference.pack_int4(weight.float(), 64))


def test_constant_and_zero_rows_are_kept_exactly() -> None:
    weight = torch.tensor([[0.0], [0.5]]).expand(2, 32)
    out = torch.empty(2, 32)
    reference.unpack(reference.pack_int4(weight), out, form="int4", group=32)
    assert torch.equal(out, weight)
    reference.unpack(reference.pack_int8(weight), out, form="int8", group=64)
    assert torch.equal(out[0], weight[0])
    assert torch.allclose(out, weight, rtol=2**-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        reference.pack_int8(weight)
    with pytest.raises(ValueError, match="not finite"):
        reference.pack_int4(weight)


def test_values_beyond_float16_are_refused_as_int4_and_kept_as_int8() -> None:
    weight = torch.linspace(0, 1e6, 32)[None]
    with pytest.raises(ValueError, match="ends at 65504"):
        reference.pack_int4(weight)
    out = torch.empty(1, 32)
    reference.unpack(reference.pack_int8(weight), out, form="int8", group=64)
    assert float((out - weight).abs().max()) <= 1e6 / 127


def test_only_matrices_are_packed() -> None:
    with pytest.raises(ValueError, match=r"not shape \(2, 3, 32\)"):
        reference.pack_int8(torch.zeros(2, 3, 32))
