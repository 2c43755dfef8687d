"""Any optimizer of torch's updates after planned passes: eager's bits, checkpoints, and warnings with numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import CheckpointError, compile_step
from gascompile.core.errors import StorageError, UnsupportedOpError
from gascompile.core.sizes import format_size
from gascompile.training.optimizers.kept_state import KeptState
from gascompile.training.state.pieces import Stored
from gascompile.training.step import TrainingStep
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, Trial

Make = Callable[[nn.Module], torch.optim.Optimizer]
BATCHES = [
    (torch.randn(6, 32, generator=torch.Generator().manual_seed(i)), torch.randint(0, 32, (6,)))
    for i in range(6)
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 32)
    )


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1}, {"params": rest}]
    return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=1e-3, weight_decay=0.1)


class Signs(torch.optim.Optimizer):
    """An optimizer of a user's: steps by signs, and counts them in the group and in the state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / state["count"])


def signs(model: nn.Module) -> torch.optim.Optimizer:
    return Signs(model.parameters())


class Nested(torch.optim.Optimizer):
    """Keeps tensors in lists and tuples, and state that is of no parameter, as Shampoo and SOAP do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        own: Any = self.state
        whole = own["whole"]
        whole["steps"] = whole.get("steps", 0) + 1
        whole["norms"] = {1: torch.ones(2) * whole["steps"], "$tuple": (1, 2.5)}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last: list[torch.Tensor] = state.setdefault("last", [])
                last.append(parameter.grad.clone())
                del last[:-3]
                state["mean"] = (sum(last) / len(last), {"by": torch.tensor(len(last))}, [])
                parameter.sub_(state["mean"][0], alpha=group["lr"] * float(whole["norms"][1][0]))


def nested(model: nn.Module) -> torch.optim.Optimizer:
    return Nested(model.parameters())


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, budget: Any = "64MiB"
) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        optimizer,
        budget,
        BATCHES[0],
        machine=MACHINE,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
        unplanned_optimizer=True,
    )


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two states have the same bits."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("make", [rmsprop, signs])
def test_any_optimizer_is_eager(make: Make, tmp_path: Path) -> None:
    trial = Trial(
        network(),
        loss_fn,
        BATCHES[:4],
        tmp_path,
        make,
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        {"unplanned_optimizer": True},
    )
    trial.planned().assert_equals(trial.eager())


def test_clipping_and_accumulation_are_eager(tmp_path: Path) -> None:
    options = {"unplanned_optimizer": True, "accumulate": 2, "max_grad_norm": 0.1}
    trial = Trial(network(), loss_fn, BATCHES, tmp_path, rmsprop, options=options)
    trial.planned().assert_equals(trial.eager())


def test_a_budget_that_updates_do_not_fit_is_warned_of(tmp_path: Path) -> None:
    options = {"unplanned_optimizer": True}
    wide = nn.Sequential(
        nn.Linear(32, 128), *(nn.Linear(128, 128) for _ in range(6)), nn.Linear(128, 32)
    )
    trial = Trial(wide, loss_fn, BATCHES[:3], tmp_path, rmsprop, options=options)
    budget = trial.smallest_budget()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = trial.planned(budget)
    result.assert_equals(trial.eager())
    before, after = (str(warning.message) for warning in seen)
    size = format_size(sum(p.numel() for p in wide.parameters()) * 4)
    assert f"parameters of {size} and gradients of {size} in memory, and its state of 0 B" in before
    assert "RMSprop is not planned" in after
    assert f"of a budget of {format_size(budget)}. AdamW" in after
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.planned(64 << 20)


@pytest.mark.parametrize("make", [rmsprop, adagrad, signs, nested])
def test_runs_go_on_from_checkpoints_and_states(make: Make, tmp_path: Path) -> None:
    plain = network()
    plain_optimizer = make(plain)
    torch.manual_seed(5)
    expected = [plain_step(plain, plain_optimizer, batch) for batch in BATCHES]
    model = network()
    optimizer = make(model)
    torch.manual_seed(5)
    found = [plain_step(model, optimizer, BATCHES[0])]
    with compiled(model, optimizer, tmp_path) as step:
        found.append(float(step(BATCHES[1])))
        step.save(tmp_path / "run")
        found.append(float(step(BATCHES[2])))
        step.save(tmp_path / "run", {"batches": 3})
        kept = step.state_dict()
        random = torch.get_rng_state()
        step(BATCHES[0])
    other = network()
    with compiled(other, make(other), tmp_path) as step:
        assert step.load(tmp_path / "run") == {"batches": 3}
        found.append(float(step(BATCHES[3])))
        assert not same(step.state_dict()["optimizer"], kept["optimizer"])
        step.load_state_dict(kept)
        assert same(step.state_dict(), kept)
        torch.set_rng_state(random)
        assert float(step(BATCHES[3])) == found[-1]
        found.append(float(step(BATCHES[4])))
        optimizer = step.optimizer
    found.append(plain_step(other, optimizer, BATCHES[5]))
    assert found == expected
    assert same(other.state_dict(), plain.state_dict())
    assert same(optimizer.state_dict(), plain_optimizer.state_dict())
    assert all(parameter.numel() for parameter in other.parameters())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"held": object()}, r"has under 'held' a builtins\.object"),
        ({"held": [{1, 2}]}, r"has under 'held' a builtins\.set"),
        ({"held": {"$tensor": 1}}, r"has under 'held' a builtins\.dict"),
        ({"held": (float("nan"),)}, "has under 'held' .* is NaN"),
        (torch.ones(2), "parameter 0 is a Tensor in the place of a dict"),
    ],
)
def test_states_that_no_checkpoint_holds_are_refused(value: Any, said: str, tmp_path: Path) -> None:
    model = network()
    optimizer = signs(model)
    with compiled(model, optimizer, tmp_path) as step:
        step(BATCHES[0])
        optimizer.state[next(iter(model.parameters()))] = value
        with pytest.raises(UnsupportedOpError, match=f"{said}.*torch\\.save"):
            step.save(tmp_path / "run")
        optimizer.state.clear()


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        ([[0, "a", {"$tensor": 1}, "made"]], ["state:0#0"], "lacks tensor 1"),
        ([[0, "a", {"$tuple": 3}, "made"]], [], "state is damaged"),
        ([], ["state:x#1"], "of no parameter"),
        ([], ["state:1"], "of no parameter"),
    ],
)
def test_damaged_states_are_refused(rows: Any, tensors: list[str], said: str) -> None:
    stored = {name: Stored(name=name, dtype="float32", shape=(2,), pieces=()) for name in tensors}
    with pytest.raises(CheckpointError, match=said):
        _ = KeptState(stored, rows).state


def test_optimizers_without_a_state_of_their_own_are_refused(tmp_path: Path) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    model = network()
    with pytest.raises(UnsupportedOpError, match=r"Wrapper has not called .*__init__"):
        compiled(model, Wrapper(rmsprop(model)), tmp_path)


def test_checkpoints_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model = network()
    with compiled(model, rmsprop(model), tmp_path) as step:
        step(BATCHES[0])
        step.save(tmp_path / "run")
    with (
        compiled(model, nadam(model), tmp_path) as step,
        pytest.raises(CheckpointError, match=r"another kind of optimizer|is of RMSprop"),
    ):
        step.load(tmp_path / "run")


def test_hooks_of_the_optimizer_are_called(tmp_path: Path) -> None:
    model = network()
    optimizer, seen = rmsprop(model), []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(all(p.grad is not None for p in o.param_groups[0]["params"]))
    )
    with compiled(model, optimizer, tmp_path) as step:
        step(BATCHES[0])
        step.eval(BATCHES[0])
        assert seen == [True]
        assert all(p.grad is None for p in model.parameters())


def test_an_update_that_fails_leaves_a_step_to_restore(tmp_path: Path) -> None:
    model = network()
    optimizer = rmsprop(model)
    with compiled(model, optimizer, tmp_path) as step:
        step(BATCHES[0])
        kept = copy.deepcopy(step.state_dict())

        def fail(*_: Any) -> None:
            raise KeyError("planned by the test")

        handle = optimizer.register_step_post_hook(fail)
        with pytest.raises(KeyError, match="planned"):
            step(BATCHES[1])
        handle.remove()
        with pytest.raises(StorageError, match=r"KeyError.*half updated"):
            step(BATCHES[1])
        step.load_state_dict(kept)
        assert same(step.state_dict(), kept)
        step(BATCHES[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            "LBFGS computes the loss several times.*closure",
        ),
        (lambda m: torch.optim.SparseAdam(m.parameters()), "sparse gradients"),
    ],
)
def test_optimizers_that_need_more_are_refused(make: Make, message: str, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(UnsupportedOpError, match=message):
        compiled(model, make(model), tmp_path)


def test_coded_states_are_of_planned_updates(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(ValueError, match="planned updates"):
        compile_step(
            model,
            loss_fn,
            rmsprop(model),
            None,
            cache_dir=tmp_path,
            states="8bit",
            unplanned_optimizer=True,
        )


def test_evaluations_go_on_where_updates_do(tmp_path: Path) -> None:
    """The state, which comes with the first update, leaves no room in the smallest budget."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 10))
    batch = (torch.randn(32, 256), torch.randint(10, (32,)))
    trial = Trial(
        model, loss_fn, [batch], tmp_path, optimizer=rmsprop, options={"unplanned_optimizer": True}
    )
    wanted = copy.deepcopy(model)
    theirs = rmsprop(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trial.compiled(model, rmsprop(model), trial.smallest_budget()) as step:
            step(batch)
            found = step.eval(batch)
            narrow = step((batch[0][:16], batch[1][:16]))
    loss_fn(wanted, batch).backward()
    theirs.step()
    theirs.zero_grad()
    assert torch.equal(found, loss_fn(wanted.eval(), batch))
    assert torch.equal(narrow, loss_fn(wanted.train(), (batch[0][:16], batch[1][:16])))
