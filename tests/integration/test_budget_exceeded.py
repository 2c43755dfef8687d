"""Ops that take more than any plan knew: planned for at the second try, or refused before they take it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.codegen.build import has_compiler
from gascompile.core.errors import BudgetExceededError, InfeasiblePlanError
from tests.allocator import peak_growth_bytes

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")

_SCRATCH_BYTES = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _greedy() -> Iterator[None]:
    """Define an op that takes a mebibyte, which nothing but a call shows."""
    with torch.library._scoped_library("memory_tests", "FRAGMENT") as library:
        library.define("greedy(Tensor x) -> Tensor")
        library.impl("greedy", _greedy_cpu, "CPU")
        library.impl("greedy", torch.empty_like, "Meta")
        yield


def _greedy_cpu(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8)
    return x + scratch[0]


class Greedy(nn.Module):
    """Four layers around the op, and a counter where asked for."""

    num_calls: torch.Tensor

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
        self.counts = counts
        if counts:
            self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        if self.counts:
            self.num_calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = torch.ops.memory_tests.greedy(x)
        return found


X = torch.randn(8, 256)


def smallest_budget(model: nn.Module, cache_dir: Path) -> int:
    with pytest.raises(InfeasiblePlanError) as found:
        gascompile.compile(model, 1, (X,), cache_dir=cache_dir)
    return found.value.required_bytes


def test_the_plan_is_made_again_and_the_result_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Greedy()
    budget = smallest_budget(model, tmp_path) + _SCRATCH_BYTES * 5 // 4
    found: list[torch.Tensor] = []
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path) as compiled:
        assert "greedy" in " ".join(compiled.plan.warnings)
        streamed = compiled.plan.arena_bytes["cpu"]
        taken_bytes = peak_growth_bytes(lambda: found.append(compiled(X)))
        assert "the plan is made again" in caplog.text
        assert compiled.plan.arena_bytes["cpu"] < streamed
        assert compiled.last_run is not None
        assert _SCRATCH_BYTES < compiled.last_run.peak_bytes["cpu"] <= budget
        assert taken_bytes <= budget
    assert torch.equal(found[0], model(X))
    # Remembered: the next plan needs no second try.
    caplog.clear()
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(X), model(X))
    assert "the plan is made again" not in caplog.text


def test_where_no_plan_fits_the_error_names_the_smallest_budget(tmp_path: Path) -> None:
    model = Greedy()
    budget = smallest_budget(model, tmp_path)
    compiled = gascompile.compile(model, budget, (X,), cache_dir=tmp_path)
    with pytest.raises(InfeasiblePlanError) as found:
        compiled(X)
    assert found.value.required_bytes >= budget + _SCRATCH_BYTES // 2
    compiled.close()
    enough = found.value.required_bytes
    with gascompile.compile(model, enough, (X,), cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(X), model(X))


def test_refused_calls_teach_the_same_each_time(tmp_path: Path) -> None:
    model = Greedy()
    budget = smallest_budget(model, tmp_path)
    required = []
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path) as compiled:
        for _ in range(3):
            with pytest.raises(InfeasiblePlanError) as found:
                compiled(X)
            required.append(found.value.required_bytes)
    assert len(set(required)) == 1
    with gascompile.compile(model, required[0], (X,), cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(X), model(X))


def test_states_that_had_changed_are_not_changed_twice(tmp_path: Path) -> None:
    model = Greedy(counts=True)
    budget = smallest_budget(model, tmp_path)
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path) as compiled:
        with pytest.raises(BudgetExceededError, match="half updated") as found:
            compiled(X)
        assert found.value.half_updated
        assert found.value.op.startswith("greedy")
        assert found.value.planned_bytes < _SCRATCH_BYTES <= found.value.real_bytes
        assert found.value.budget_bytes == budget
        copied = pickle.loads(pickle.dumps(found.value))
        assert str(copied) == str(found.value)


def test_a_warning_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Greedy()
    budget = smallest_budget(model, tmp_path)
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path, on_exceed="warn") as compiled:
        for _ in range(2):
            assert torch.equal(compiled(X), model(X))
        assert compiled.last_run is not None
        assert compiled.last_run.peak_bytes["cpu"] > budget
    said = [r for r in caplog.records if "passed the budget" in r.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert "greedy" in said[0].getMessage()
    with pytest.raises(ValueError, match="on_exceed"):
        gascompile.compile(model, budget, (X,), cache_dir=tmp_path, on_exceed="panic")


def test_dropout_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    class Draws(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Draw before the op."""
            return super().forward(x + torch.rand_like(x))

    model = Draws()
    budget = smallest_budget(model, tmp_path) + _SCRATCH_BYTES * 5 // 4
    with gascompile.compile(model, budget, (X,), cache_dir=tmp_path) as compiled:
        torch.manual_seed(1)
        found = compiled(X)
    torch.manual_seed(1)
    assert torch.equal(found, model(X))


def test_products_with_slices_are_planned_for_in_full(tmp_path: Path) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Multiply with every second column."""
            return x @ self.weight[:, ::2]

    model, x = Sliced(), torch.randn(4, 512)
    with pytest.raises(InfeasiblePlanError) as error:
        gascompile.compile(model, 1, (x,), cache_dir=tmp_path)
    budget = error.value.required_bytes
    with gascompile.compile(model, budget, (x,), cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(x), model(x))
        assert compiled.last_run is not None
        assert compiled.last_run.peak_source == "allocator"
        assert compiled.last_run.peak_bytes["cpu"] <= budget


def test_without_a_compiler_planned_workspace_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with gascompile.compile(nn.Linear(8, 8), None, (X[:, :8],), cache_dir=tmp_path) as compiled:
        compiled(X[:, :8])
        assert compiled.last_run is not None
        assert compiled.last_run.peak_source == "planned workspace"
    assert "no-such-compiler" in caplog.text
