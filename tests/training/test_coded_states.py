"""Moments in 8 bits: training stays close to that in float32, resumes bit for bit, and moves a quarter of the bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gascompile import CheckpointError, TrainingStep, compile_step
from gascompile.training.optimizers.optimizers import StateForm
from tests.training.runs import MACHINE, PLANNING_S, adamw, batches, loss_fn, new_model, plain_step

TIGHT = 9 << 20
TOLERANCE = 0.005
"""Of a loss, relative: what moments in 8 bits may change within these runs."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)


def compiled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    budget: int | str = "64MiB",
    states: StateForm = "8bit",
    **options: float,
) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        optimizer,
        budget,
        batches(1)[0],
        machine=MACHINE,
        cache_dir=folder / "cache",
        time_limit_s=PLANNING_S,
        states=states,
        **options,  # type: ignore[arg-type]
    )


def repeated(count: int) -> list[torch.Tensor]:
    """Return batches of which there are four: what can be learnt by heart."""
    found = batches(4)
    return [found[number % 4] for number in range(count)]


@pytest.mark.parametrize("make", [adamw, adam, sgd])
def test_losses_stay_close_to_those_with_float32_and_fall(make: Make, tmp_path: Path) -> None:
    plain = new_model().train()
    optimizer = make(plain)
    torch.manual_seed(5)
    expected = [plain_step(plain, optimizer, batch) for batch in repeated(40)]
    model = new_model().train()
    with compiled(model, make(model), tmp_path) as step:
        torch.manual_seed(5)
        losses = [float(step(batch)) for batch in repeated(40)]
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)  # nothing has been coded yet
    assert losses != expected
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_plans_count_a_byte_per_element_but_for_small_parameters(tmp_path: Path) -> None:
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path) as step:
        step(batches(1)[0])
        assert step.plan is not None
        for parameter in model.named_parameters():
            name = parameter[0]
            numel = step.state_dict()["model"][name].numel()
            found = {t: p for t, p in step.plan.tensors.items() if t.startswith(f"{name}:")}
            assert len(found) == 2
            for tensor, planned in found.items():
                is_coded = numel >= 4096
                assert (":8bit" in tensor) == is_coded
                blocks = -(-numel // 256)
                assert planned.size_bytes == (257 * blocks if is_coded else 4 * numel)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_run_resumes_bit_for_bit_from_a_checkpoint(make: Make, tmp_path: Path) -> None:
    model = new_model().train()
    with compiled(model, make(model), tmp_path) as step:
        torch.manual_seed(5)
        for batch in batches(3):
            step(batch)
        step.save(tmp_path / "kept")
        expected = [float(step(batch)) for batch in batches(6)[3:]]
        state = step.state_dict()["model"]
    other = new_model(2).train()
    with compiled(other, make(other), tmp_path) as step:
        step.load(tmp_path / "kept")
        assert [float(step(batch)) for batch in batches(6)[3:]] == expected
        for name, value in step.state_dict()["model"].items():
            assert torch.equal(value, state[name])


def test_checkpoints_hold_moments_as_they_are(tmp_path: Path) -> None:
    model = new_model().train()
    sizes = {}
    for form in ("fp32", "8bit"):
        model = new_model().train()
        with compiled(model, adamw(model), tmp_path, states=form) as step:
            step(batches(1)[0])
            saved = step.save(tmp_path / form)
            sizes[form] = (saved / "optimizer.safetensors").stat().st_size
    assert sizes["8bit"] < 0.3 * sizes["fp32"]


def test_a_checkpoint_of_another_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, states="fp32") as step:
        step(batches(1)[0])
        step.save(tmp_path / "kept")
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path) as step:
        torch.manual_seed(5)
        before = step.state_dict()["model"]
        with pytest.raises(CheckpointError, match=r"'fp32', this step as '8bit'.*state_dict"):
            step.load(tmp_path / "kept")
        for name, value in step.state_dict()["model"].items():
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("make", [adamw, sgd])
def test_states_go_out_as_torch_has_them_and_come_back_as_they_were(
    make: Make, tmp_path: Path
) -> None:
    model = new_model().train()
    with compiled(model, make(model), tmp_path) as step:
        torch.manual_seed(5)
        for batch in batches(3):
            step(batch)
        random = torch.get_rng_state()
        state = copy.deepcopy(step.state_dict())
        expected = [float(step(batch)) for batch in batches(6)[3:]]
    # Torch's own optimizer takes them.
    plain = new_model(2).train()
    plain.load_state_dict(state["model"])
    optimizer = make(plain)
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    torch.set_rng_state(random)
    for batch, loss in zip(batches(6)[3:], expected, strict=True):
        assert plain_step(plain, optimizer, batch) == pytest.approx(loss, rel=TOLERANCE)
    # And so does another planned step, to which they are what they were, bit for bit.
    other = new_model(2).train()
    with compiled(other, make(other), tmp_path) as step:
        step.load_state_dict(state)
        again = step.state_dict()["optimizer"]["state"]
        for index, entry in state["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(again[index][key], value)
        torch.set_rng_state(random)
        assert [float(step(batch)) for batch in batches(6)[3:]] == expected


def test_an_optimizer_that_has_stepped_is_taken_over_and_given_back(tmp_path: Path) -> None:
    model = new_model().train()
    optimizer = adamw(model)
    torch.manual_seed(5)
    for batch in batches(3):
        plain_step(model, optimizer, batch)
    head = model.embedding.weight
    mean, square = (optimizer.state[head][key].clone() for key in ("exp_avg", "exp_avg_sq"))
    with compiled(model, optimizer, tmp_path):
        pass
    for key, before in (("exp_avg", mean), ("exp_avg_sq", square)):
        blocks = before.view(-1, 256)
        near = blocks.abs() >= blocks.abs().amax(dim=1, keepdim=True) / 8
        off = (optimizer.state[head][key].view(-1, 256) - blocks).abs()
        assert bool((off <= blocks.abs() / 32)[near].all())
        assert bool(off.any())
    assert int(optimizer.state[head]["step"]) == 3


def test_a_tight_budget_gives_the_same_results_and_moves_a_quarter(tmp_path: Path) -> None:
    """Whatever leaves memory: coded states are the same as in a run that keeps everything there."""
    losses, moved, moments = {}, {}, {}
    for form, budget in (("8bit", 1 << 30), ("8bit", TIGHT), ("fp32", TIGHT)):
        model = new_model(width=192).train()
        with compiled(model, adamw(model), tmp_path, budget=budget, states=form) as step:  # type: ignore[arg-type]
            torch.manual_seed(5)
            losses[form, budget] = [float(step(batch)) for batch in batches(4)]
            assert step.last_run is not None
            assert step.last_run.peak_bytes["cpu"] <= budget
            assert step.plan is not None
            moved[form, budget] = sum(step.last_run.link_bytes.values())
            # Which of them leave memory hangs on what ops took here.
            moments[form, budget] = {
                tensor.replace(":8bit", ""): plan.size_bytes
                for tensor, plan in step.plan.tensors.items()
                if ":exp_avg" in tensor
            }
    assert 0 < moved["8bit", TIGHT] < moved["fp32", TIGHT]
    coded, plain = moments["8bit", TIGHT], moments["fp32", TIGHT]
    both = coded.keys() & plain.keys()
    assert both
    assert sum(coded[name] for name in both) < 0.26 * sum(plain[name] for name in both)
    assert losses["8bit", 1 << 30] == losses["8bit", TIGHT]


def test_clipping_and_accumulation_work_on_coded_states(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.5, "accumulate": 2}
    found = {}
    for form in ("fp32", "8bit"):
        model = new_model().train()
        with compiled(model, adamw(model), tmp_path, states=form, **options) as step:  # type: ignore[arg-type]
            torch.manual_seed(5)
            found[form] = [float(step(batch)) for batch in repeated(16)]
    assert found["8bit"] != found["fp32"]
    for ours, theirs in zip(found["8bit"], found["fp32"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    model = new_model().train()
    with pytest.raises(ValueError, match=r"states='4bit'; it is one of fp32, 8bit"):
        compiled(model, adamw(model), tmp_path, states="4bit")  # type: ignore[arg-type]
