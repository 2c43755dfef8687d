"""States in torch's formats: runs go on in plain torch and back, bit for bit, and nothing else is let in."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import CheckpointError, compile_step
from gascompile.training.attempt import Attempt
from gascompile.training.state.train_state import States
from tests.training.runs import (
    MACHINE,
    PLANNING_S,
    TinyGPT,
    adamw,
    batches,
    compiled,
    loss_fn,
    new_model,
    plain_losses,
    plain_step,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def plain_run(make: Make, count: int) -> list[float]:
    """Return the losses of a run in plain torch whose learning rate decays."""
    model = new_model().train()
    optimizer = make(model)
    scheduler = decay(optimizer)
    torch.manual_seed(5)
    found = []
    for batch in batches(count):
        found.append(plain_step(model, optimizer, batch))
        scheduler.step()
    return found


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_compiled_run_goes_on_in_plain_torch(make: Make, tmp_path: Path) -> None:
    model = new_model().train()
    optimizer = make(model)
    scheduler = decay(optimizer)
    losses = []
    with compiled(model, optimizer, tmp_path) as step:
        torch.manual_seed(5)
        for batch in batches(6)[:3]:
            losses.append(float(step(batch)))
            scheduler.step()
        random = torch.get_rng_state()
        state = copy.deepcopy(step.state_dict())
    other = new_model(2).train()
    other.load_state_dict(state["model"])
    other_optimizer = make(other)
    other_scheduler = decay(other_optimizer)
    other_optimizer.load_state_dict(state["optimizer"])
    other_scheduler.load_state_dict(scheduler.state_dict())
    torch.set_rng_state(random)
    for batch in batches(6)[3:]:
        losses.append(plain_step(other, other_optimizer, batch))
        other_scheduler.step()
    assert losses == plain_run(make, 6)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_plain_run_goes_on_compiled(make: Make, tmp_path: Path) -> None:
    plain = new_model().train()
    plain_optimizer = make(plain)
    plain_scheduler = decay(plain_optimizer)
    torch.manual_seed(5)
    losses = []
    for batch in batches(6)[:3]:
        losses.append(plain_step(plain, plain_optimizer, batch))
        plain_scheduler.step()
    random = torch.get_rng_state()
    model = new_model(2).train()
    optimizer = make(model)
    scheduler = decay(optimizer)
    with compiled(model, optimizer, tmp_path) as step:
        step(batches(1)[0])  # forgotten by loading
        state = {"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}
        step.load_state_dict(state)
        scheduler.load_state_dict(plain_scheduler.state_dict())
        torch.set_rng_state(random)
        for batch in batches(6)[3:]:
            losses.append(float(step(batch)))
            scheduler.step()
        assert step.num_steps == 6 or make is sgd  # SGD counts nothing
    assert losses == plain_run(make, 6)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_an_optimizer_that_has_stepped_is_taken_over_and_given_back(
    make: Make, tmp_path: Path
) -> None:
    model = new_model().train()
    optimizer = make(model)
    torch.manual_seed(5)
    losses = [plain_step(model, optimizer, batch) for batch in batches(6)[:2]]
    random = torch.get_rng_state()
    with compiled(model, optimizer, tmp_path) as step:
        assert not optimizer.state  # no second copy of the moments in memory
        torch.set_rng_state(random)
        losses += [float(step(batch)) for batch in batches(6)[2:4]]
        random = torch.get_rng_state()
    torch.set_rng_state(random)
    losses += [plain_step(model, optimizer, batch) for batch in batches(6)[4:]]
    reference = new_model().train()
    reference_optimizer = make(reference)
    torch.manual_seed(5)
    assert losses == [plain_step(reference, reference_optimizer, batch) for batch in batches(6)]
    for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, wanted)


def test_a_state_before_the_first_plan_is_the_models_own(tmp_path: Path) -> None:
    model = new_model().train()
    optimizer = adamw(model)
    step = compile_step(
        model,
        loss_fn,
        optimizer,
        "64MiB",
        machine=MACHINE,
        cache_dir=tmp_path,
        time_limit_s=PLANNING_S,
    )
    with step:
        state = copy.deepcopy(step.state_dict())
        other = new_model(2)
        step.load_state_dict({"model": other.state_dict(), "optimizer": state["optimizer"]})
        assert torch.equal(model.head.weight, other.head.weight)
        with pytest.raises(ValueError, match="prepare"):
            step.save(tmp_path / "checkpoints")
        with pytest.raises(ValueError, match="prepare"):
            step.load(tmp_path / "checkpoints")


@pytest.mark.parametrize("make", [adamw, sgd])
def test_parameters_updated_unequally_go_on_as_in_eager(make: Make, tmp_path: Path) -> None:
    def begun() -> tuple[TinyGPT, torch.optim.Optimizer]:
        model = new_model().train()
        optimizer = make(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" not in name)
        torch.manual_seed(5)
        plain_step(model, optimizer, batches(1)[0])
        return model.requires_grad_(), optimizer

    plain, plain_optimizer = begun()
    expected = [plain_step(plain, plain_optimizer, batch) for batch in batches(5)[1:]]
    model, optimizer = begun()
    with compiled(model, optimizer, tmp_path) as step:
        losses = [float(step(batch)) for batch in batches(5)[1:3]]
        step.save(tmp_path / "run")
        random = torch.get_rng_state()
        step(batches(1)[0])
        step.load(tmp_path / "run")
        torch.set_rng_state(random)
        losses.append(float(step(batches(4)[3])))
        step.load_state_dict(step.state_dict())
        losses.append(float(step(batches(5)[4])))
    assert losses == expected
    found, wanted = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    for index, entry in wanted.items():
        assert all(torch.equal(value, found[index][key]) for key, value in entry.items())


def test_states_of_other_models_are_refused_and_change_nothing(tmp_path: Path) -> None:
    reference = plain_losses(2)
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        torch.manual_seed(5)
        assert float(step(batches(1)[0])) == reference[0]
        random = torch.get_rng_state()
        good = step.state_dict()
        deeper = TinyGPT(blocks=2).state_dict()
        with pytest.raises(CheckpointError, match=r"has 'blocks\.1\.down\.bias'"):
            step.load_state_dict({**good, "model": deeper})
        fewer = {n: v for n, v in good["model"].items() if not n.startswith("blocks.0.up")}
        with pytest.raises(
            CheckpointError, match=r"lacks 'blocks\.0\.up\.bias', 'blocks\.0\.up\.w"
        ):
            step.load_state_dict({**good, "model": fewer})
        with pytest.raises(CheckpointError, match=r"'blocks\.0\.down\.bias' as \[32\]"):
            step.load_state_dict({**good, "model": TinyGPT(32).state_dict()})
        narrow = TinyGPT(32)
        narrow_optimizer = adamw(narrow)
        plain_step(narrow, narrow_optimizer, batches(1)[0])
        with pytest.raises(CheckpointError, match="'exp_avg' of shape"):
            step.load_state_dict({**good, "optimizer": narrow_optimizer.state_dict()})
        with pytest.raises(CheckpointError, match="another kind of optimizer"):
            step.load_state_dict({**good, "optimizer": sgd(new_model()).state_dict()})
        with pytest.raises(CheckpointError, match="'model' and 'optimizer'"):
            step.load_state_dict({"state_dict": {}})
        torch.set_rng_state(random)
        assert float(step(batches(2)[1])) == reference[1]


def test_moments_that_memory_has_no_room_for_stay_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model().train()
    optimizer = adamw(model)
    step = compiled(model, optimizer, tmp_path, budget="64MiB")
    step(batches(1)[0])
    monkeypatch.setattr("gascompile.training.state.giving_back.available_bytes", lambda: 1000)
    with pytest.warns(UserWarning, match="use save before close"):
        step.close()
    assert not optimizer.state
    assert model.head.weight.shape == (512, 64)


def some_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with momentum in one of its groups."""
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.05)


def test_momentum_in_one_group_is_taken_over(tmp_path: Path) -> None:
    expected = plain_run(some_momentum, 6)
    model = new_model().train()
    optimizer = some_momentum(model)
    scheduler = decay(optimizer)
    torch.manual_seed(5)
    losses = []
    for batch in batches(6)[:2]:
        losses.append(plain_step(model, optimizer, batch))
        scheduler.step()
    with compiled(model, optimizer, tmp_path) as step:
        for batch in batches(6)[2:4]:
            losses.append(float(step(batch)))
            scheduler.step()
        step.load_state_dict(step.state_dict())
    assert len(optimizer.state) == 1
    for batch in batches(6)[4:]:
        losses.append(plain_step(model, optimizer, batch))
        scheduler.step()
    assert losses == expected


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_who_is_interrupted_twice_while_closing_reads_what_comes_back(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model().train()
    optimizer = adamw(model)
    step = compiled(model, optimizer, tmp_path)
    step(batches(1)[0])
    expected = step.state_dict()
    give, wait, num_left = States.give, Attempt.wait, iter(range(2))

    def slow(states: States, name: str) -> None:
        time.sleep(0.01)
        give(states, name)

    def interrupted(attempt: Attempt) -> None:
        if next(num_left, None) is not None:
            raise KeyboardInterrupt
        wait(attempt)

    monkeypatch.setattr(States, "give", slow)
    monkeypatch.setattr(Attempt, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.close()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    assert next(num_left, None) is None
    for part in sorted(parts, key=lambda part: part != first):
        torch.testing.assert_close(parts[part].state_dict(), expected[part], rtol=0, atol=0)
    assert all(type(value) is torch.nn.Parameter for value in model.parameters())
    step.close()
