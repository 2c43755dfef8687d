"""Adam by the Triton kernels: torch's fused updates to rounding, over odd sizes, offsets and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.runtime.kernels import state_codes, updates
from gascompile.runtime.kernels.adam import adam, adam_coded
from gascompile.runtime.kernels.state_codes import SIGNED, UNSIGNED, parts
from gascompile.runtime.kernels.updates import AdamOptions, Coded

EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PLAIN = AdamOptions(
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.1,
    maximize=False,
    decoupled=True,
    step=3,
)
OPTIONS = st.builds(
    AdamOptions,
    lr=st.sampled_from([0.0, 1e-3, 0.3]),
    beta1=st.sampled_from([0.0, 0.3, 0.9]),
    beta2=st.sampled_from([0.5, 0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
    decoupled=st.booleans(),
    step=st.sampled_from([1, 2, 1000]),
)
TOLERANCE = 4e-7
"""Of a value's size and of what is added to it: a few roundings of float32."""


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(count: int, seed: int, device: torch.device) -> Operands:
    """Return parameter, gradient, mean and mean of squares, behind an odd number of other values."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for number in range(4):
        area = torch.randn(count + 3, generator=random).to(device)
        value = area[3:] if number != 1 else area[1:-2]
        if number >= 2:
            value.mul_(0.1)
        if number == 3:
            value.square_()
        found.append(value)
    return found[0], found[1], found[2], found[3]


def copies(tensors: Operands, device: torch.device | str) -> Operands:
    one, two, three, four = (tensor.clone().to(device) for tensor in tensors)
    return one, two, three, four


def assert_near(result: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    assert bool(((result.cpu() - expected).abs() <= TOLERANCE * (expected.abs() + sizes)).all())


@EXAMPLES
@given(
    count=st.one_of(st.integers(1, 40), st.sampled_from([1023, 1025, 3000])),
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    scaled=st.booleans(),
)
def test_equals_torch_to_rounding(
    device: torch.device, count: int, seed: int, options: AdamOptions, scaled: bool
) -> None:
    ours = operands(count, seed, device)
    theirs = copies(ours, "cpu")
    before = theirs[0].clone()
    scale = torch.tensor(0.37) if scaled else None
    adam(*ours, options, scale=None if scale is None else scale.to(device))
    updates.adam(*theirs, options, scale=scale)
    gradient = theirs[1].abs() + before.abs()
    assert_near(ours[0], theirs[0], before.abs() + (theirs[0] - before).abs())
    assert_near(ours[2], theirs[2], gradient)
    assert_near(ours[3], theirs[3], gradient.square())
    assert torch.equal(ours[1].cpu(), theirs[1])


def test_several_steps_equal_the_optimizer(device: torch.device) -> None:
    own = torch.nn.Parameter(torch.randn(777))
    optimizer = torch.optim.AdamW([own], lr=1e-2, weight_decay=0.1)
    value = own.detach().clone().to(device)
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(1, 9):
        gradient = torch.randn(777)
        own.grad = gradient
        optimizer.step()
        options = replace(PLAIN, lr=1e-2, step=step)
        adam(value, gradient.to(device), mean, square, options)
        assert torch.allclose(value.cpu(), own.detach(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(mean.cpu(), optimizer.state[own]["exp_avg"], rtol=1e-6, atol=1e-7)


def test_nothing_beside_the_range_is_written(device: torch.device) -> None:
    area = [torch.full((1300,), 7.0, device=device) for _ in range(4)]
    area[1].fill_(5.0)
    value, gradient, mean, square = (tensor[100:1130] for tensor in area)
    adam(value, gradient, mean, square, PLAIN)
    for place in (0, 2, 3):
        assert bool((area[place][:100] == 7).all() and (area[place][1130:] == 7).all())
        assert not bool((area[place][100:1130] == 7).any())


def coded_states(mean: torch.Tensor, square: torch.Tensor) -> tuple[Coded, Coded]:
    found = (state_codes.coded(mean.cpu(), SIGNED), state_codes.coded(square.cpu(), UNSIGNED))
    one, other = (parts(state.to(mean.device)) for state in found)
    return one, other


def off_by(ours: tuple[Coded, Coded], theirs: tuple[Coded, Coded]) -> tuple[int, float]:
    """Return by how much a code differs at most, and how many do, as a share."""
    worst, different, total = 0, 0, 0
    for (codes, scales), (other_codes, other_scales) in zip(ours, theirs, strict=True):
        assert torch.equal(scales.cpu(), other_scales)
        off = (codes.cpu() - other_codes).view(torch.int8).int().abs()
        worst = max(worst, int(off.max()))
        different += int((off > 0).sum())
        total += off.numel()
    return worst, different / total


@EXAMPLES
@given(
    count=st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 1025, 3000])),
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    scaled=st.booleans(),
)
def test_coded_states_become_those_of_the_reference(
    device: torch.device, count: int, seed: int, options: AdamOptions, scaled: bool
) -> None:
    """Where a value lies between two codes but for rounding, they may differ by one."""
    value, gradient, mean, square = operands(count, seed, device)
    ours, theirs = coded_states(mean, square), coded_states(mean.cpu(), square.cpu())
    expected = value.clone().cpu()
    before = expected.clone()
    scale = torch.tensor(0.37) if scaled else None
    adam_coded(
        value, gradient, ours, options, scale=None if scale is None else scale.to(value.device)
    )
    updates.adam_coded(expected, gradient.cpu(), theirs, options, scale=scale)
    assert_near(value, expected, before.abs() + (expected - before).abs())
    worst, share = off_by(ours, theirs)
    assert worst <= 1
    assert share <= 0.002 + 1 / count


def test_coded_states_over_many_blocks_and_dithers(device: torch.device) -> None:
    """More elements than the dither has, which the reference takes piece by piece."""
    count = state_codes.DITHERS + 5000
    value, gradient, mean, square = operands(count, 3, device)
    ours, theirs = coded_states(mean, square), coded_states(mean.cpu(), square.cpu())
    expected = value.clone().cpu()
    adam_coded(value, gradient, ours, PLAIN)
    workspace = updates.Workspace(state_codes.DITHERS, PLAIN.step)
    for begin in range(0, count, state_codes.DITHERS):
        end = min(begin + state_codes.DITHERS, count)
        rows = slice(begin // 256, -(-end // 256))
        one, other = ((codes[rows], scales[rows]) for codes, scales in theirs)
        updates.adam_coded(
            expected[begin:end], gradient[begin:end].cpu(), (one, other), PLAIN, workspace
        )
    assert torch.allclose(value.cpu(), expected, rtol=1e-6, atol=1e-7)
    worst, share = off_by(ours, theirs)
    assert worst <= 1
    assert share < 1e-4


# The interpreter computes with numpy, which says where a quotient is none.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_spreads_to_its_block_and_no_further(device: torch.device) -> None:
    value, gradient, mean, square = operands(3 * 256, 4, device)
    gradient[300], gradient[600] = float("nan"), float("inf")
    ours = coded_states(mean, square)
    theirs = coded_states(mean.cpu(), square.cpu())
    expected = value.clone().cpu()
    adam_coded(value, gradient, ours, PLAIN)
    updates.adam_coded(expected, gradient.cpu(), theirs, PLAIN)
    assert torch.equal(value.cpu().isnan(), expected.isnan())
    assert value.isnan().sum() == 2
    for (codes, scales), code in zip(ours, (SIGNED, UNSIGNED), strict=True):
        state = torch.cat([codes.view(-1), scales]).cpu()
        found = state_codes.decoded(state, 3 * 256, code)
        finite = found.view(3, 256).isfinite()
        assert bool(finite[0].all())
        assert not bool(finite[1:].any())


def _states(count: int) -> tuple[Coded, Coded]:
    return coded_states(torch.zeros(count), torch.zeros(count))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            TypeError,
            "gradient is torch.bfloat16",
            lambda: updates.adam(
                torch.ones(4), torch.ones(4).bfloat16(), torch.ones(4), torch.ones(4), PLAIN
            ),
        ),
        (
            ValueError,
            r"mean has shape \(3,\)",
            lambda: updates.adam(torch.ones(4), torch.ones(4), torch.ones(3), torch.ones(4), PLAIN),
        ),
        (
            ValueError,
            r"square has shape \(4,\) and strides \(2,\)",
            lambda: updates.adam(
                torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(8)[::2], PLAIN
            ),
        ),
        (
            ValueError,
            "gradient is on meta, the parameter on cpu",
            lambda: updates.adam(
                torch.ones(4), torch.ones(4, device="meta"), torch.ones(4), torch.ones(4), PLAIN
            ),
        ),
        (
            ValueError,
            r"300 elements have codes \[2, 256\] and scales \[2\], not \[1, 256\] and \[1\]",
            lambda: updates.adam_coded(torch.ones(300), torch.ones(300), _states(256), PLAIN),
        ),
        (
            TypeError,
            "coded states are torch.uint8, not torch.int8",
            lambda: updates.adam_coded(
                torch.ones(256),
                torch.ones(256),
                tuple((c.view(torch.int8), b) for c, b in _states(256)),  # type: ignore[arg-type]
                PLAIN,
            ),
        ),
        (
            ValueError,
            "70000 elements at once",
            lambda: updates.adam_coded(
                torch.ones(70_000), torch.ones(70_000), _states(70_000), PLAIN
            ),
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    error: type[Exception], message: str, call: Callable[[], None]
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_nothing(device: torch.device) -> None:
    none = torch.empty(0, device=device)
    updates.adam(none, none, none, none, PLAIN)
    updates.adam_coded(none, none, coded_states(none, none), PLAIN)


@pytest.mark.gpu
def test_entry_points_launch_the_kernels_on_a_gpu() -> None:
    gpu = torch.device("cuda")
    value, gradient, mean, square = operands(3000, 5, gpu)
    by_kernel = copies((value, gradient, mean, square), gpu)
    updates.adam(value, gradient, mean, square, PLAIN)
    adam(*by_kernel, PLAIN)
    assert torch.equal(value, by_kernel[0])
    states, same = coded_states(mean, square), coded_states(mean, square)
    other = value.clone()
    updates.adam_coded(value, gradient, states, PLAIN)
    adam_coded(other, gradient, same, PLAIN)
    assert torch.equal(value, other)
    assert torch.equal(states[1][0], same[1][0])
