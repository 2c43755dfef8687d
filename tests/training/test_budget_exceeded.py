"""Ops of a step that take more than any plan knew: planned for at the second try, refused, or let pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import TrainingStep, compile_step
from gascompile.codegen.build import has_compiler
from gascompile.core.errors import BudgetExceededError, InfeasiblePlanError, StorageError
from tests.training.runs import MACHINE, PLANNING_S

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")

_SCRATCH_BYTES = 1 << 20
BATCHES = [torch.randn(8, 128, generator=torch.Generator().manual_seed(n)) for n in range(3)]


@pytest.fixture(scope="module", autouse=True)
def _greedy() -> Iterator[None]:
    """Define an op that takes a mebibyte, which nothing but a call shows."""
    with torch.library._scoped_library("step_memory_tests", "FRAGMENT") as library:
        library.define("greedy(Tensor x) -> Tensor")
        library.impl("greedy", _greedy_cpu, "CPU")
        library.impl("greedy", torch.empty_like, "Meta")
        library.define("late(Tensor x) -> Tensor")
        library.impl("late", torch.clone, "CompositeExplicitAutograd")
        for name, backward in (("greedy", torch.clone), ("late", greedy)):
            torch.library.register_autograd(
                f"step_memory_tests::{name}",
                lambda _, gradient, backward=backward: backward(gradient),
                lib=library,
            )
        yield


def greedy(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.step_memory_tests.greedy(x)
    return found


_fills: list[bool] = []
"""Not empty where the next call takes memory until there is none."""


def _greedy_cpu(x: torch.Tensor) -> torch.Tensor:
    taken: list[torch.Tensor] = []
    while _fills:
        try:
            taken.append(torch.zeros(256, dtype=torch.uint8))
        except torch.OutOfMemoryError:
            _fills.clear()
            raise
    scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8)
    return x + scratch[0]


class Greedy(nn.Module):
    """Layers with dropout before the op, which a second try must not draw again; or the op at the end of it all."""

    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(6)])
        self.is_late = is_late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        for number, layer in enumerate(self.layers):
            x = functional.dropout(layer(x), 0.1, self.training)
            if self.is_late and number == 0:
                x = torch.ops.step_memory_tests.late(x)
        return x if self.is_late else greedy(x)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square."""
    found: torch.Tensor = model(batch).square().mean()
    return found


def new_model(*, is_late: bool = False) -> Greedy:
    torch.manual_seed(3)
    return Greedy(is_late=is_late)


def new_step(model: nn.Module, budget: int, folder: Path, **options: Any) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        budget,
        BATCHES[0],
        machine=MACHINE,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
        **options,
    )


def smallest_budget(folder: Path, *, is_late: bool = False) -> int:
    with pytest.raises(InfeasiblePlanError) as found:
        new_step(new_model(is_late=is_late), 1, folder)
    return found.value.required_bytes


def eager() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def losses_of(step: TrainingStep) -> list[float]:
    torch.manual_seed(5)
    return [float(step(batch)) for batch in BATCHES]


def assert_as_eager(model: nn.Module, losses: list[float]) -> None:
    wanted, values = eager()
    assert losses == wanted
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_the_plan_is_made_again_and_the_steps_are_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = smallest_budget(tmp_path) + _SCRATCH_BYTES * 5 // 4
    for tries in (1, 0):
        model = new_model()
        caplog.clear()
        with new_step(model, budget, tmp_path) as step:
            losses = losses_of(step)
            assert step.last_run is not None
            assert _SCRATCH_BYTES < step.last_run.peak_bytes["cpu"] <= budget
        # Remembered: the next step needs no second try.
        assert caplog.text.count("the plan is made again") == tries
        assert_as_eager(model, losses)


def test_random_numbers_are_put_back_where_no_memory_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state of the generator takes 5 kB, more than the stopped run has left."""
    budget = smallest_budget(tmp_path) + _SCRATCH_BYTES * 5 // 4
    model = new_model()
    with new_step(model, budget, tmp_path) as step:
        _fills.append(True)
        losses = losses_of(step)
    assert not _fills
    assert "the plan is made again" in caplog.text
    assert_as_eager(model, losses)


def test_where_no_plan_fits_the_error_names_the_smallest_budget(tmp_path: Path) -> None:
    budget, model = smallest_budget(tmp_path), new_model()
    with new_step(model, budget, tmp_path) as step, pytest.raises(InfeasiblePlanError) as found:
        step(BATCHES[0])
    assert found.value.required_bytes >= budget + _SCRATCH_BYTES // 2
    with new_step(model, found.value.required_bytes, tmp_path) as step:
        losses = losses_of(step)
    assert_as_eager(model, losses)


def test_updates_that_were_made_are_not_made_twice(tmp_path: Path) -> None:
    budget, model = smallest_budget(tmp_path, is_late=True), new_model(is_late=True)
    with new_step(model, budget, tmp_path) as step:
        step.save(tmp_path / "saved")
        with pytest.raises(BudgetExceededError, match="half updated") as found:
            step(BATCHES[0])
        assert found.value.op.startswith("greedy")
        assert found.value.planned_bytes < _SCRATCH_BYTES <= found.value.real_bytes
        with pytest.raises(StorageError, match="load"):
            step(BATCHES[0])
        step.load(tmp_path / "saved")
    # The next plan knows what this one was stopped for.
    with pytest.raises(InfeasiblePlanError) as refused:
        new_step(new_model(is_late=True), budget, tmp_path)
    with new_step(new_model(is_late=True), refused.value.required_bytes, tmp_path) as step:
        step(BATCHES[0])


def test_a_step_may_pass_its_budget_where_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget, model = smallest_budget(tmp_path), new_model()
    with new_step(model, budget, tmp_path, on_exceed="warn") as step:
        losses = losses_of(step)
        assert step.last_run is not None
        assert step.last_run.peak_bytes["cpu"] > budget - (4 << 20)
    assert caplog.text.count("the run passed the budget") == 1
    assert "greedy" in caplog.text
    assert_as_eager(model, losses)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_exceed is one of error, warn, not 'ignore'"):
        new_step(new_model(), 1 << 30, tmp_path, on_exceed="ignore")
