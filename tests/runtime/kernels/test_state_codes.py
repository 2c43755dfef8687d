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
    """Return all values of a block whose largest is ``largest``, not negative, in plain arithmetic of float64."""
    if largest == 0:
        return [0.0]
    _, exponent = math.frexp(largest)
    # The octave that the largest reaches with the base added to it; 2 ** -149 is float32's own smallest step.
    octave = math.frexp(largest + 2.0 ** (exponent - code.octaves))[1] - 1
    first = max(octave - code.octaves, -127)
    found = []
    for number in range(code.largest + 1):
        whole, part = divmod(number, 16)
        if first == -127:
            # No base: float32's own numbers from zero on, of which those below 2 ** -126 are evenly apart.
            found.append((16 + part) * 2.0 ** (whole - 131) if whole else part * 2.0**-130)
        else:
            found.append((16 + part) * 2.0 ** (first + whole - 4) - 2.0**first)
    return found


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
    size=st.sampled_from([1.0, 3e-5, 1e-20, 1e-36, 1e-40, 1e30]),
)
def test_each_value_becomes_the_nearest_of_its_blocks_grid(
    code: Code, count: int, seed: int, spread: float, size: float
) -> None:
    values = vectors(count, seed, spread, size, code)
    found = decoded(coded(values, code), count, code)
    for begin in range(0, count, BLOCK):
        block, got = values[begin : begin + BLOCK].double(), found[begin : begin + BLOCK].double()
        points = torch.tensor(grid(float(block.abs().max()), code), dtype=torch.float64)
        near = (block.abs()[:, None] - points).abs().min(dim=1).values
        off = (got - block).abs()
        # Adding the base rounds once more, by far less than a step.
        slack = 2.0**-22 * float(block.abs().max()) + 2.0**-148
        kept = (block == 0) | (got != 0) | code.signed
        assert bool(kept.all())
        if code.signed:
            assert bool((off <= near + slack).all())
            assert not bool((torch.sign(got) * torch.sign(block) < 0).any())
        else:
            one = points[1] if len(points) > 1 else 0.0  # what is not zero does not become zero
            assert bool(
                (off <= torch.maximum(near, torch.where(block > 0, one - block, 0)) + slack).all()
            )


@pytest.mark.parametrize("code", CODES)
@EXAMPLES
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1.0, 8.0, 30.0]))
def test_values_are_off_by_no_more_than_said(code: Code, seed: int, spread: float) -> None:
    values = vectors(2 * BLOCK, seed, spread, 1e-3, code)
    got = decoded(coded(values, code), 2 * BLOCK, code)
    largest = values.view(2, BLOCK).abs().amax(dim=1, keepdim=True).expand(2, BLOCK).reshape(-1)
    part = 2**-11 if code.signed else 2**-18
    assert bool(((got - values).abs() <= values.abs() / 32 + largest * part).all())


@pytest.mark.parametrize("code", CODES)
@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 6.0, 30.0]),
    size=st.sampled_from([1.0, 1e-36, 1e-41, 1e37]),
)
def test_decoding_and_coding_again_changes_nothing(
    code: Code, seed: int, spread: float, size: float
) -> None:
    first = coded(vectors(700, seed, spread, size, code), code)
    values = decoded(first, 700, code)
    again = decoded(coded(values, code), 700, code)
    assert torch.equal(values.view(torch.int32), again.view(torch.int32))


@pytest.mark.parametrize("code", CODES)
def test_blocks_whose_largest_is_about_a_power_of_two(code: Code) -> None:
    """There the octave changes, and with it all of a block's grid."""
    for exponent in (-3, 0, 40):
        near = torch.nextafter(torch.tensor(2.0**exponent), torch.tensor([0.0, math.inf]))
        for largest in (*near.tolist(), 2.0**exponent, 2.0**exponent * (1 - 2.0**-code.octaves)):
            values = torch.linspace(0, largest, BLOCK)
            first = coded(values, code)
            assert torch.equal(first, coded(decoded(first, BLOCK, code), code))
            assert float((decoded(first, BLOCK, code) - values).abs().max()) <= largest / 31


@pytest.mark.parametrize("code", CODES)
def test_zeros_are_zero_bytes_and_back(code: Code) -> None:
    count = 1000
    zeros = torch.zeros(coded_bytes(count), dtype=torch.uint8)
    assert torch.equal(decoded(zeros, count, code), torch.zeros(count))
    assert torch.equal(coded(torch.zeros(count), code), zeros)


@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_stays_in_its_place(code: Code) -> None:
    values = torch.rand(4 * BLOCK)
    values[3], values[BLOCK + 5] = math.inf, math.nan
    values[2 * BLOCK + 7] = -math.nan
    if code.signed:
        values[9] = -math.inf
    found = decoded(coded(values, code), 4 * BLOCK, code)
    assert torch.equal(found.isnan(), values.isnan())
    infinite = values.isinf()
    assert torch.equal(found[infinite], values[infinite])
    assert bool((found[3 * BLOCK :] - values[3 * BLOCK :]).abs().max() < 1 / 31)


@pytest.mark.parametrize("code", CODES)
def test_small_values_are_neither_lost_nor_negative(code: Code) -> None:
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 1.0
    found = decoded(coded(values, code), BLOCK, code)
    assert float(found[0]) == pytest.approx(1, rel=1 / 31)
    if code.signed:
        assert bool((found[1:] == 0).all())
    else:
        assert bool(((found[1:] > 0) & (found[1:] < 2**-18)).all())


def test_an_average_that_changes_little_follows_with_the_dither_alone() -> None:
    """A thousandth of the way per step, from 1 to 0.25, which the steps of the code are too large for."""
    found = {}
    for name in ("dither", "nearest"):
        values = torch.ones(BLOCK)
        values[0] = 4.0  # keeps the grid where it is
        state = coded(values, UNSIGNED)
        exact = values.clone()
        codes, bases = state_codes.parts(state)
        for step in range(1, 2001):
            now = decoded(state, BLOCK, UNSIGNED)
            target = torch.full((BLOCK,), 0.25)
            target[0] = 4.0
            now, exact = now.lerp(target, 0.001), exact.lerp(target, 0.001)
            added = dither(step)[:BLOCK] if name == "dither" else None
            state_codes.encode(now.view(1, BLOCK), codes, bases, UNSIGNED, added)
        found[name] = float((decoded(state, BLOCK, UNSIGNED) / exact - 1)[1:].mean())
    assert abs(found["dither"]) < 0.02
    assert found["nearest"] > 1  # has not moved at all


def test_dither_is_even_over_elements_and_over_steps() -> None:
    size = 1 << state_codes.SHIFT
    one = dither(5).double() / size
    assert one.shape == (DITHERS,)
    assert float(one.min()) >= 0
    assert float(one.max()) < 1
    counts = torch.histc(one.float(), 64, 0, 1)
    assert float((counts / (DITHERS / 64) - 1).abs().max()) < 0.01
    over_steps = torch.stack([dither(step)[:3] for step in range(1, 257)]).double() / size
    assert float((over_steps.mean(dim=0) - 0.5).abs().max()) < 0.01


@pytest.mark.parametrize("count", [1, 255, 256, 257, 70_000])
def test_sizes(count: int) -> None:
    blocks = -(-count // 256)
    assert coded_bytes(count) == blocks * 257 == coded(torch.rand(count), SIGNED).numel()
