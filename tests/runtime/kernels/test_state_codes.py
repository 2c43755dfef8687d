"""States in 8 bits: within the bounds of their module, against a plain reference that knows the grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.state_codes import (
    BLOCK,
    DITHERS,
    SIGNED,
    UNSIGNED,
    Code,
    coded,
    coded_bytes,
    decoded,
    dither,
)

CODES = [pytest.param(SIGNED, id="signed"), pytest.param(UNSIGNED, id="unsigned")]
EXAMPLES = settings(max_examples=25, deadline=None)


def grid(largest: float, code: Code) -> list[float]:
    """Return all values of a block whose largest is ``largest``, not negative, in plain arithmetic of float64.

    Four octaves of 16 steps each, or 32, below the power of two that is above the largest; below them four of half as
    many steps each, and so on down to a single step; then two steps of two octaves each, one of four, and zero.
    """
    _, exponent = math.frexp(largest)
    top = 2.0**exponent
    found = [top]
    per_octave, octave_top = 1 << (code.bits - 3), top
    while per_octave:
        for _ in range(4):
            step = octave_top / 2 / per_octave
            found += [octave_top - step * (i + 1) for i in range(per_octave)]
            octave_top /= 2
        per_octave //= 2
    return [*found[1:], *(octave_top * 2.0**-octaves for octaves in (2, 4, 8)), 0.0]


def vectors(count: int, seed: int, spread: float, size: float, code: Code) -> torch.Tensor:
    """Return values that lie over ``spread`` octaves, some of them zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * np.exp2(random.uniform(-spread, 0, count)) * size
    values[random.random(count) < 0.1] = 0
    found = torch.from_numpy(values.astype(np.float32))
    return found if code.signed else found.abs()


@pytest.mark.parametrize("code", CODES)
@EXAMPLES
@given(
    count=st.integers(1, 3 * BLOCK),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 4.0, 12.0, 40.0]),
    size=st.sampled_from([1.0, 3e-5, 1e-20, 1e-28, 1e30]),
)
def test_each_value_becomes_the_nearest_of_its_blocks_grid(
    code: Code, count: int, seed: int, spread: float, size: float
) -> None:
    values = vectors(count, seed, spread, size, code)
    found = decoded(coded(values, code), count, code)
    for begin in range(0, count, BLOCK):
        block, got = values[begin : begin + BLOCK].double(), found[begin : begin + BLOCK].double()
        largest = float(block.abs().max())
        points = torch.tensor(grid(largest, code), dtype=torch.float64)
        assert len(set(points.tolist())) == code.largest + 1
        assert bool(torch.isin(got.abs(), points).all())
        near = (block.abs()[:, None] - points).abs().min(dim=1).values
        off = (got - block).abs()
        if code.signed:
            assert bool((off <= near + 2.0**-20 * largest * (near > 0)).all())
            assert not bool((torch.sign(got) * torch.sign(block) < 0).any())
        else:
            # What is not zero does not become zero.
            assert torch.equal(got == 0, block == 0)
            smallest = torch.where(block > 0, (points[-2] - block).abs(), 0)
            assert bool((off <= torch.maximum(near, smallest) + 2.0**-20 * largest).all())


@pytest.mark.parametrize("code", CODES)
@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1.0, 8.0, 30.0]), step=st.integers(1, 9)
)
def test_values_are_off_by_no_more_than_said(
    code: Code, seed: int, spread: float, step: int
) -> None:
    """Also where the dither rounds a mean of squares the other way, whose codes are twice as fine."""
    values = vectors(2 * BLOCK, seed, spread, 1e-3, code)
    state = coded(values, code)
    if not code.signed:
        codes, scales = state_codes.parts(state)
        state_codes.encode(values.clone().view(2, BLOCK), codes, scales, code, dither(step, 512))
    got = decoded(state, 2 * BLOCK, code)
    largest = values.view(2, BLOCK).abs().amax(dim=1, keepdim=True).expand(2, BLOCK).reshape(-1)
    for octaves in range(4, 25, 4):
        near = values.abs() >= largest * 2.0 ** (1 - octaves)
        part = 2.0 ** (octaves // 4 - 6)
        assert bool((((got - values).abs() <= values.abs() * part * 1.0001) | ~near).all())


@pytest.mark.parametrize("code", CODES)
@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 6.0, 30.0]),
    size=st.sampled_from([1.0, 1e-28, 1e36]),
)
def test_decoding_and_coding_again_changes_nothing(
    code: Code, seed: int, spread: float, size: float
) -> None:
    first = coded(vectors(700, seed, spread, size, code), code)
    assert torch.equal(first, coded(decoded(first, 700, code), code))


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_what_its_value_becomes(code: Code) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if code.signed:
        codes[128] = 0  # a sign without a value, which coding does not write
    state = torch.cat([codes, torch.tensor([127], dtype=torch.uint8)])
    values = decoded(state, BLOCK, code)
    assert torch.equal(coded(values, code), state)
    assert sorted(set(values.abs().tolist()), reverse=True) == grid(0.6, code)


@pytest.mark.parametrize("code", CODES)
def test_blocks_whose_largest_is_about_a_power_of_two(code: Code) -> None:
    """There the scale changes, and with it all of a block's grid."""
    for exponent in (-3, 0, 40):
        near = torch.nextafter(torch.tensor(2.0**exponent), torch.tensor([0.0, math.inf]))
        for largest in (*near.tolist(), 2.0**exponent):
            values = torch.linspace(0, largest, BLOCK)
            first = coded(values, code)
            assert torch.equal(first, coded(decoded(first, BLOCK, code), code))
            assert float((decoded(first, BLOCK, code) - values).abs().max()) <= largest / 32


@pytest.mark.parametrize("code", CODES)
def test_zeros_are_zero_bytes_and_back(code: Code) -> None:
    count = 1000
    zeros = torch.zeros(coded_bytes(count), dtype=torch.uint8)
    assert torch.equal(decoded(zeros, count, code), torch.zeros(count))
    assert torch.equal(coded(torch.zeros(count), code), zeros)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.nan, -math.inf, 1e38])
def test_a_block_with_what_is_not_finite_has_nothing_that_is(code: Code, bad: float) -> None:
    values = torch.rand(3 * BLOCK)
    values[BLOCK + 5] = bad if code.signed else abs(bad)
    found = decoded(coded(values, code), 3 * BLOCK, code).view(3, BLOCK)
    assert torch.equal(found.isfinite().all(dim=1), torch.tensor([True, False, True]))
    assert not bool(found[1].isfinite().any())
    assert bool((found[2] - values[2 * BLOCK :]).abs().max() < 1 / 32)


@pytest.mark.parametrize("code", CODES)
def test_a_block_of_subnormal_numbers_is_zeros(code: Code) -> None:
    values = torch.full((BLOCK,), 1e-39)
    assert torch.equal(decoded(coded(values, code), BLOCK, code), torch.zeros(BLOCK))
    values[3] = 1.2e-38
    assert float(decoded(coded(values, code), BLOCK, code)[3]) == pytest.approx(1.2e-38, rel=1 / 32)


def test_an_average_that_changes_little_follows_with_the_dither_alone() -> None:
    """A hundredth of the way per step, from 1 to 0.25, which the steps of the code are too large for."""
    found = {}
    for name in ("dither", "nearest"):
        values = torch.ones(BLOCK)
        values[0] = 4.0  # keeps the grid where it is
        state = coded(values, UNSIGNED)
        exact = values.clone()
        codes, bases = state_codes.parts(state)
        for step in range(1, 201):
            now = decoded(state, BLOCK, UNSIGNED)
            target = torch.full((BLOCK,), 0.25)
            target[0] = 4.0
            now, exact = now.lerp(target, 0.01), exact.lerp(target, 0.01)
            added = dither(step)[:BLOCK] if name == "dither" else None
            state_codes.encode(now.view(1, BLOCK), codes, bases, UNSIGNED, added)
        found[name] = float((decoded(state, BLOCK, UNSIGNED) / exact - 1)[1:].mean())
    assert abs(found["dither"]) < 0.02
    assert found["nearest"] > 0.5  # twice as large: it has not moved at all


def test_dither_is_even_over_elements_and_over_steps() -> None:
    size = 1
    one = dither(5).double() / size
    assert one.shape == (DITHERS,)
    assert float(one.min()) >= 0
    assert float(one.max()) < 1
    counts = torch.histc(one.float(), 64, 0, 1)
    assert float((counts / (DITHERS / 64) - 1).abs().max()) < 0.01
    over_steps = torch.stack([dither(step, 3) for step in range(1, 257)]).double() / size
    assert float((over_steps.mean(dim=0) - 0.5).abs().max()) < 0.01


@pytest.mark.parametrize("count", [1, 255, 256, 257, 70_000])
def test_sizes(count: int) -> None:
    blocks = -(-count // 256)
    assert coded_bytes(count) == blocks * 257 == coded(torch.rand(count), SIGNED).numel()
