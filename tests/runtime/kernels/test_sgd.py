"""SGD by the Triton kernels: what torch's optimizer makes, to rounding, and its momentum in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.runtime.kernels import state_codes, updates
from gascompile.runtime.kernels.sgd import sgd, sgd_coded
from gascompile.runtime.kernels.state_codes import SIGNED, parts
from gascompile.runtime.kernels.updates import SgdOptions

EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
COUNTS = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 1025, 3000]))
PLAIN = SgdOptions(
    lr=0.1,
    momentum=0.9,
    dampening=0.1,
    weight_decay=0.01,
    nesterov=False,
    maximize=False,
    is_first=False,
)
OPTIONS = st.builds(
    SgdOptions,
    lr=st.sampled_from([0.0, 0.1]),
    momentum=st.sampled_from([0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    is_first=st.booleans(),
)


def vector(count: int, random: torch.Generator, device: torch.device) -> torch.Tensor:
    """Return values behind an odd number of others."""
    return torch.randn(count + 3, generator=random).to(device)[3:]


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(result.cpu(), expected, rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(
    count=COUNTS,
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    scaled=st.booleans(),
    kept=st.booleans(),
)
def test_equals_the_reference_to_rounding(
    device: torch.device, count: int, seed: int, options: SgdOptions, scaled: bool, kept: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    value, gradient, momentum = (vector(count, random, device) for _ in range(3))
    expected, expected_momentum = value.clone().cpu(), momentum.clone().cpu()
    scale = torch.tensor(0.37) if scaled else None
    there = None if scale is None else scale.to(device)
    sgd(value, gradient, momentum if kept else None, options, scale=there)
    updates.sgd(expected, gradient.cpu(), expected_momentum if kept else None, options, scale=scale)
    assert same(value, expected)
    assert same(momentum, expected_momentum)


@pytest.mark.parametrize("nesterov", [False, True])
def test_several_steps_equal_the_optimizer(device: torch.device, nesterov: bool) -> None:
    own = torch.nn.Parameter(torch.randn(777))
    optimizer = torch.optim.SGD(
        [own], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov, maximize=True
    )
    value = own.detach().clone().to(device)
    momentum = torch.full_like(value, 7.0)  # has no value yet
    for step in range(5):
        gradient = torch.randn(777)
        own.grad = gradient
        optimizer.step()
        options = replace(
            PLAIN, dampening=0.0, nesterov=nesterov, maximize=True, is_first=step == 0
        )
        sgd(value, gradient.to(device), momentum, options)
        assert same(value, own.detach())
    assert same(momentum, optimizer.state[own]["momentum_buffer"])


@EXAMPLES
@given(count=COUNTS, seed=st.integers(0, 2**31), options=OPTIONS, scaled=st.booleans())
def test_a_coded_momentum_becomes_that_of_the_reference(
    device: torch.device, count: int, seed: int, options: SgdOptions, scaled: bool
) -> None:
    """Where a value lies between two codes but for rounding, they may differ by one."""
    random = torch.Generator().manual_seed(seed)
    value, gradient = (vector(count, random, device) for _ in range(2))
    state = state_codes.coded(torch.randn(count, generator=random), SIGNED)
    ours, theirs = parts(state.to(device)), parts(state.clone())
    expected = value.clone().cpu()
    scale = torch.tensor(0.37) if scaled else None
    there = None if scale is None else scale.to(device)
    sgd_coded(value, gradient, ours, options, scale=there)
    updates.sgd_coded(expected, gradient.cpu(), theirs, options, scale=scale)
    assert same(value, expected)
    assert torch.equal(ours[1].cpu(), theirs[1])
    off = (ours[0].cpu() - theirs[0]).view(torch.int8).int().abs()
    assert int(off.max()) <= 1
    assert int(off.sum()) <= 0.002 * count + 1


def test_nothing_beside_the_range_is_written(device: torch.device) -> None:
    area = [torch.full((1300,), 7.0, device=device) for _ in range(3)]
    value, gradient, momentum = (tensor[100:1130] for tensor in area)
    sgd(value, gradient, momentum, PLAIN)
    for tensor in (area[0], area[2]):
        assert bool((tensor[:100] == 7).all() and (tensor[1130:] == 7).all())
        assert not bool((tensor[100:1130] == 7).any())


def test_a_gradient_is_written_only_where_it_may_be() -> None:
    for may_write in (False, True):
        value, gradient, momentum = torch.ones(9), torch.ones(9), torch.ones(9)
        updates.sgd(value, gradient, momentum, PLAIN, scale=torch.tensor(2.0), may_write=may_write)
        assert bool((gradient != 1).all()) == may_write


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    four, coded = torch.ones(4, device=device), parts(torch.zeros(257, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"momentum has shape \(3,\)"):
        updates.sgd(four, four, four[:3], PLAIN)
    with pytest.raises(TypeError, match=r"gradient is torch\.float16"):
        updates.sgd(four, four.half(), None, PLAIN)
    with pytest.raises(ValueError, match=r"300 elements have codes \[2, 256\]"):
        updates.sgd_coded(torch.ones(300), torch.ones(300), coded, PLAIN)
    none = four[:0]
    updates.sgd(none, none, none, PLAIN)
    empty = parts(torch.zeros(0, dtype=torch.uint8, device=device))
    updates.sgd_coded(none, none, empty, PLAIN)
