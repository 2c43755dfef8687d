"""Packing against values worked out one by one, and against the error that rounding to nearest allows."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gascompile.formats.layout import GROUPS, LOW_BITS
from gascompile.formats.quantize import pack
from gascompile.runtime.kernels import reference


def bfloat16(bits: int) -> float:
    """Return the number whose upper half as a float32 is ``bits``."""
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def signed_by_hand(row: bytes, columns: int, group: int, low_bits: int) -> list[float]:
    """Return the values of a packed row, read as the format's description says."""
    groups = -(-columns // group)
    upper = struct.unpack_from(f"<{columns}b", row)
    low_bytes = -(-columns * low_bits // 8)
    low, codes = row[columns : columns + low_bytes], row[columns + low_bytes :]
    steps_offset = columns + low_bytes + (groups + 1) // 2
    steps_offset += steps_offset % 2
    values = []
    for column in range(columns):
        number = column // group
        code = codes[number // 2] >> 4 if number % 2 else codes[number // 2] & 15
        (step,) = struct.unpack_from("<H", row, steps_offset + 2 * (number // 16))
        q = upper[column] << low_bits
        if low_bits:
            shift = column // low_bytes * low_bits
            q |= (low[column % low_bytes] >> shift) & ((1 << low_bits) - 1)
        values.append(q * code * bfloat16(step))
    return values


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
    row = [127.0, -63.0, 1.0] + [0.0] * 13 + [0.0, 254.0, -254.0]
    packed = pack(torch.tensor([row]) * 7.5 / 1.00390625, "int8", 16)
    assert packed.shape == (1, 32)
    assert packed[0, :3].view(torch.int8).tolist() == [119, -59, 1]
    assert packed[0, 16:19].view(torch.int8).tolist() == [0, 127, -127]
    assert int(packed[0, 19]) == 8 | 15 << 4
    assert packed[0, 20:22].view(torch.bfloat16).tolist() == [1.0]
    assert packed[0, 22:].tolist() == [0] * 10


def test_int10_row_by_hand() -> None:
    """Upper bits round down, so that the lower ones are added."""
    row = torch.tensor([511.0, -511.0, 2.0, -1.0, 5.0]) * 15 / 1.00390625
    packed = pack(row[None], "int10", 16)
    assert packed[0, :5].view(torch.int8).tolist() == [127, -128, 0, -1, 1]
    # Columns 0, 2 and 4 in one byte, 1 and 3 in the other; the step was rounded up, so 511 became 509.
    assert packed[0, 5:7].tolist() == [0b01_10_01, 0b11_11]


def test_int4_row_by_hand() -> None:
    """From -1 to 6.5 in steps of 0.5 are exactly the sixteen values of a group."""
    weight = torch.tensor([[-1.0 + 0.5 * (column % 16) for column in range(32)]])
    packed = pack(weight, "int4", 32)
    assert packed.shape == (1, 32)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]
    assert packed[0, 16:20].view(torch.float16).tolist() == [0.5, -1.0]
    out = torch.empty(1, 32)
    reference.unpack(packed, out, form="int4", group=32)
    assert torch.equal(out, weight)


@given(
    rows=st.integers(1, 5),
    columns=st.one_of(st.integers(1, 150), st.integers(250, 270)),
    group=st.sampled_from(GROUPS),
    form=st.sampled_from(list(LOW_BITS)),
    seed=st.integers(0, 1000),
)
def test_signed_forms_are_within_half_a_step_of_the_weight(
    rows: int, columns: int, group: int, form: str, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = pack(weight, form, group)
    out = torch.empty(rows, columns)
    reference.unpack(packed, out, form=form, group=group)
    low_bits = LOW_BITS[form]
    for row in range(rows):
        by_hand = signed_by_hand(bytes(packed[row].tolist()), columns, group, low_bits)
        assert out[row].tolist() == by_hand
    largest = weight.abs().amax(dim=1, keepdim=True)
    for first in range(0, columns, group):
        part = slice(first, first + group)
        # A code is rounded up, and counts at most a fifteenth of the largest scale around.
        scale = weight[:, part].abs().amax(dim=1, keepdim=True) + largest / 15
        allowed = scale / ((128 << low_bits) - 1) * 0.5 * 1.02
        wrong = (out - weight)[:, part].square().mean(dim=1, keepdim=True).sqrt()
        assert bool((wrong <= allowed).all())


@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    group=st.sampled_from(GROUPS),
    seed=st.integers(0, 1000),
)
def test_int4_is_near_the_weight(rows: int, groups: int, group: int, seed: int) -> None:
    columns = groups * group
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = pack(weight, "int4", group)
    out = torch.empty(rows, columns)
    reference.unpack(packed, out, form="int4", group=group)
    for row in range(rows):
        by_hand = int4_by_hand(bytes(packed[row].tolist()), columns, group)
        assert out[row].tolist() == pytest.approx(by_hand, abs=1e-6)
    spread = weight.unflatten(1, (groups, group))
    extent = spread.amax(dim=2) - spread.amin(dim=2)
    # Half a step, and what float16 loses of fifteen scales and of the minimum.
    allowed = extent / 30 + (extent + spread.abs().amax(dim=2)) * 2**-11
    wrong = (out - weight).unflatten(1, (groups, group)).square().mean(dim=2).sqrt()
    assert bool((wrong <= allowed).all())


def test_a_weight_larger_than_a_chunk_is_packed_row_by_row() -> None:
    weight = torch.randn(300, 8192)
    packed = pack(weight, "int8", 16)
    assert torch.equal(packed[299:], pack(weight[299:], "int8", 16))
    out = torch.empty(300, 8192)
    reference.unpack(packed, out, form="int8", group=16)
    assert float((out - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_packed_from_their_values(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64).to(dtype)
    assert torch.equal(pack(weight, "int8", 16), pack(weight.float(), "int8", 16))
    assert torch.equal(pack(weight, "int4", 64), pack(weight.float(), "int4", 64))


def test_constant_and_zero_rows_are_kept_exactly() -> None:
    weight = torch.tensor([[0.0], [0.5]]).expand(2, 32)
    out = torch.empty(2, 32)
    reference.unpack(pack(weight, "int4", 32), out, form="int4", group=32)
    assert torch.equal(out, weight)
    reference.unpack(pack(weight, "int8", 16), out, form="int8", group=16)
    assert torch.equal(out[0], weight[0])
    assert torch.allclose(out, weight, rtol=2**-8)


@pytest.mark.parametrize("form", ["int8", "int12", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(form: str, value: float) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="finite values only"):
        pack(weight, form, 32)


@pytest.mark.parametrize("form", list(LOW_BITS))
def test_values_beyond_float16_are_refused_as_int4_and_kept_otherwise(form: str) -> None:
    weight = torch.linspace(0, 1e6, 32)[None]
    with pytest.raises(ValueError, match="scales in float16"):
        pack(weight, "int4", 32)
    out = torch.empty(1, 32)
    reference.unpack(pack(weight, form, 16), out, form=form, group=16)
    assert float((out - weight).abs().max()) <= 1e6 / 127


@pytest.mark.parametrize("form", list(LOW_BITS))
def test_the_largest_and_the_smallest_numbers_stay_finite(form: str) -> None:
    for size in (3.4e38, 1e-30, 1e-38, 1e-44):
        weight = torch.tensor([[size, -size, size / 3] * 20])
        out = torch.empty(1, 60)
        reference.unpack(pack(weight, form, 16), out, form=form, group=16)
        assert bool(out.isfinite().all())
        assert float((out - weight).abs().max()) <= size * (0.02 if size > 1e-30 else 1)
