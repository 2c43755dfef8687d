"""Update ops on states in 8 bits: their memory, and that they are what decoding, updating and coding make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gascompile.runtime.kernels import adam as triton_adam
from gascompile.runtime.kernels import state_codes, updates
from gascompile.runtime.kernels.state_codes import SIGNED, UNSIGNED
from gascompile.training.optimizers import coded_updates, update_ops

HYPER = torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, 2.0]).double()


def test_updates_allocate_what_is_planned() -> None:
    """In a process of its own: memory that a planned step has taken over is not what torch records."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.coded_memory"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 18
    for case in cases:
        assert case["planned"] / 3 <= case["grown"] <= case["planned"] + 1024, case


def test_an_update_is_one_of_decoded_states_coded_again() -> None:
    """Over several pieces of a range that does not begin where the parameter does, and ends within a block."""
    parameter, gradient = torch.randn(1 << 18), torch.randn(1 << 18)
    begin, end = 1024 * 60, 1024 * 60 + 150_000
    values = torch.randn(end - begin) * 0.1, torch.rand(end - begin) * 0.01
    mean = state_codes.coded(values[0], SIGNED)
    square = state_codes.coded(values[1], UNSIGNED)
    plain = parameter.clone()
    moments = [
        state_codes.decoded(mean, end - begin, SIGNED),
        state_codes.decoded(square, end - begin, UNSIGNED),
    ]
    update_ops.adam(plain, gradient, *moments, HYPER, None, begin, True)
    before = parameter.clone()
    coded_updates.adam_coded(parameter, gradient, mean, square, HYPER, None, begin, end, True)
    assert torch.equal(parameter, plain)
    assert torch.equal(parameter[:begin], before[:begin])
    assert torch.equal(parameter[end:], before[end:])
    assert not bool((parameter[begin:end] == before[begin:end]).all())
    assert torch.equal(mean, state_codes.coded(moments[0], SIGNED))
    # Between the two codes around the value, as the dither has it.
    got, value = state_codes.decoded(square, end - begin, UNSIGNED), moments[1]
    largest = torch.nn.functional.pad(value, (0, 16)).view(-1, 256).amax(dim=1, keepdim=True)
    near = value >= largest.expand(-1, 256).reshape(-1)[: end - begin] / 8
    assert bool(((got - value).abs() <= value / 31)[near].all())
    assert abs(float((got / value - 1)[near].mean())) < 1e-3


def test_momentum_is_decoded_updated_and_coded_again() -> None:
    parameter, gradient = torch.randn(70_000), torch.randn(70_000)
    momentum = state_codes.coded(torch.randn(70_000), SIGNED)
    plain, kept = parameter.clone(), state_codes.decoded(momentum, 70_000, SIGNED).clone()
    update_ops.sgd(plain, gradient, kept, HYPER, None, 0, 70_000)
    coded_updates.sgd_coded(parameter, gradient, momentum, HYPER, None, 0, 70_000)
    assert torch.equal(parameter, plain)
    assert torch.equal(momentum, state_codes.coded(kept, SIGNED))


@pytest.mark.parametrize("turned", [False, True])
def test_the_op_equals_one_launch_of_the_kernel(turned: bool) -> None:
    """What a GPU does for the same op, here in Triton's interpreter."""
    parameter = torch.randn(90, 100)
    gradient = torch.randn(100, 90).t() if turned else torch.randn(90, 100)
    mean = state_codes.coded(torch.randn(9000) * 0.1, SIGNED)
    square = state_codes.coded(torch.rand(9000) * 0.01, UNSIGNED)
    launched = parameter.clone(), mean.clone(), square.clone()
    scale = torch.tensor(0.5)
    coded_updates.adam_coded(parameter, gradient, mean, square, HYPER, scale, 0, 9000, False)
    triton_adam.adam_coded(
        launched[0].view(-1),
        gradient.contiguous().view(-1),
        (state_codes.parts(launched[1]), state_codes.parts(launched[2])),
        update_ops.adam_options(HYPER, 0, decoupled=False),
        scale=scale,
    )
    assert torch.allclose(parameter, launched[0], rtol=1e-6, atol=1e-7)
    for ours, theirs in ((mean, launched[1]), (square, launched[2])):
        assert int((ours != theirs).sum()) <= 9


@pytest.mark.parametrize("kind", ["adam", "adam_coded", "sgd", "sgd_coded"])
def test_ops_run_whole_ranges_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With tensors that say they are on a GPU; a scale goes into the kernel, and no workspace is taken."""
    calls: list[tuple[int, object]] = []

    def launch(parameter: torch.Tensor, *operands: object, **options: object) -> None:
        assert not any(isinstance(o, updates.Workspace) for o in operands)
        calls.append((parameter.numel(), options["scale"]))

    monkeypatch.setattr(updates, kind, launch)
    value, scale = _Elsewhere(torch.randn(200_000)), torch.tensor(0.5)
    state = torch.zeros(state_codes.coded_bytes(200_000), dtype=torch.uint8)
    match kind:
        case "adam":
            update_ops.adam_now(value, value, value, value, HYPER, scale, 0, True)
        case "sgd":
            update_ops.sgd_now(value, value, value, HYPER, scale, 0, 200_000)
        case "adam_coded":
            coded_updates._adam_coded(value, value, state, state, HYPER, scale, 0, 200_000, True)
        case _:
            coded_updates._sgd_coded(value, value, state, HYPER, scale, 0, 200_000)
    assert calls == [(200_000, scale)]


def test_threads_are_as_before_an_update_also_one_that_fails() -> None:
    before = torch.get_num_threads()
    state, value = torch.zeros(257, dtype=torch.uint8), torch.zeros(200)
    try:
        torch.set_num_threads(2)
        coded_updates.sgd_coded(value, value.clone(), state, HYPER, None, 0, 200)
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="200 elements have codes"):
            coded_updates.sgd_coded(value, value.clone(), state[:0], HYPER, None, 0, 200)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class _Elsewhere(torch.Tensor):
    is_cuda = True


@pytest.mark.gpu
def test_ops_on_a_gpu_equal_those_on_the_cpu() -> None:
    parameter, gradient = torch.randn(300, 500), torch.randn(300, 500)
    mean = state_codes.coded(torch.randn(150_000) * 0.1, SIGNED)
    square = state_codes.coded(torch.rand(150_000) * 0.01, UNSIGNED)
    there = [t.cuda() for t in (parameter, gradient, mean, square)]
    for update in range(3):
        hyper = HYPER.clone()
        hyper[-1] = update + 1
        args = (hyper, torch.tensor(0.5), 0, 150_000, True)
        coded_updates.adam_coded(parameter, gradient, mean, square, *args)
        coded_updates.adam_coded(*there, hyper, torch.tensor(0.5).cuda(), 0, 150_000, True)
    assert torch.allclose(parameter, there[0].cpu(), rtol=1e-4, atol=1e-5)
    moments = [torch.zeros(150_000) for _ in range(2)]
    plain = [t.cuda() for t in moments]
    update_ops.adam(parameter, gradient, *moments, HYPER, None, 0, True)
    update_ops.adam(there[0], there[1], *plain, HYPER, None, 0, True)
    assert torch.allclose(moments[0], plain[0].cpu())
