"""Steps with fused ops: eager's bits, within the budget, whatever moves, is computed again or is left alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.core.errors import NanLossError
from gascompile.core.steps import Recompute, Reload
from gascompile.training.timeline import record
from tests.stand_in_kernels import StandIn, stand_in
from tests.training.keeping_worker import neither_captured_nor_planned
from tests.training.runs import MACHINE as BY_HAND
from tests.training.trials import TRANSFER_BYTES, Trial, adamw

EXACT: dict[str, Any] = {"fuse": "exact", "fuse_runs": math.inf}


class Wide(nn.Module):
    """Results that take more memory than parameters, and less time to compute than to move."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + (y * y * 0.1 + self.dropout(torch.relu(y) * 0.5)).exp() * 1e-3
        return x


class Mixed(nn.Module):
    """Chains of element-wise ops around what stays: views of views, dropout, a norm that counts, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(32, 128), nn.Linear(64, 64)
        self.last, self.norm = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.scale = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x).chunk(2, 1)
        mixed = (a * 1.5 + b) * torch.sigmoid(b) - a * a * 0.1
        mixed = self.dropout(mixed * self.scale + 0.5)
        wide = functional.relu(self.frozen(mixed)) * mixed + a.view(4, -1, 64).flatten(0, 1)
        found: torch.Tensor = self.norm(self.last(wide * 0.3 - b.abs()) + x * 2) * 0.5 + x
        return found


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(batch) * 0.7 - batch).pow(2).mean()
    return found


def batches(count: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(256, 32) for _ in range(count)]


def trial(cache: Path, **options: Any) -> Trial:
    torch.manual_seed(1)
    return Trial(Mixed(), loss_fn, batches(), cache, options={**EXACT, **options})


@pytest.fixture
def backend() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found


def test_steps_have_eagers_bits_where_values_move(backend: StandIn, tmp_path: Path) -> None:
    run = trial(tmp_path, fuse="auto")
    assert_equal_within(run, run.smallest_budget() + (192 << 10), backend, {Reload})


def test_steps_have_eagers_bits_where_ops_run_again(
    backend: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tuple(replace(link, bandwidth_bytes_per_s=3e6) for link in BY_HAND.links)
    monkeypatch.setattr("tests.training.trials.MACHINE", replace(BY_HAND, links=links))
    torch.manual_seed(1)
    rows = [torch.randn(2048, 16) for _ in range(3)]
    options = {**EXACT, "accumulate": 2}
    # On a busy machine the search for what to compute again has its time, too.
    run = Trial(Wide(), loss_fn, rows, tmp_path, options=options, planning_s=5.0)
    assert_equal_within(run, run.smallest_budget() + (1 << 20), backend, {Recompute})


def assert_equal_within(
    run: Trial, budget: int, backend: StandIn, kinds: set[type[object]]
) -> None:
    """Assert that fused steps compute what eager does, in a budget in which steps of these kinds are needed."""
    found = run.planned(budget)
    found.assert_equals(run.eager())
    assert backend.written
    assert found.plan is not None
    assert {type(step) for step in found.plan.steps} >= kinds
    assert found.peak_bytes <= budget - TRANSFER_BYTES


def test_a_kept_step_runs_its_kernels_without_making_them(
    backend: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trial(tmp_path / "cache")
    first = run.planned()
    made = len(backend.written)
    assert made
    with neither_captured_nor_planned():
        model = Mixed()
        model.load_state_dict(run.model.state_dict())
        with run.compiled(model, adamw(model), None) as step:
            assert step.fused is not None and step.fused.num_ops > step.fused.num_segments > 0
            step.save_plan(tmp_path / "plans")
        run.planned().assert_equals(first)
    assert len(backend.written) == made
    # Elsewhere they are nobody's: results are the same, by ops one by one.
    other = Trial(run.model, loss_fn, run.batches, tmp_path / "other", options=dict(run.options))
    other.options["plan"] = tmp_path / "plans"
    with caplog.at_level(logging.WARNING):
        other.planned().assert_equals(first)
    assert "machine code that was not compiled here" in caplog.text
    backend.processor = "another"
    run.planned().assert_equals(first)
    assert len(backend.written) > made


def test_an_interrupt_while_kernels_are_compiled_changes_nothing(
    backend: StandIn, tmp_path: Path
) -> None:
    run = trial(tmp_path)
    model = Mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backend.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        run.compiled(model, adamw(model), None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    backend.interrupts = False
    run.planned().assert_equals(run.eager())
    assert backend.written


def test_a_fused_step_refuses_nan_and_can_be_recorded(backend: StandIn, tmp_path: Path) -> None:
    run = trial(tmp_path)
    model = Mixed()
    with run.compiled(model, adamw(model), None) as step:
        step(run.batches[0])
        assert step.plan is not None
        with pytest.raises(NanLossError):
            step(run.batches[0] * math.nan)
        recorded = record(step, run.batches[1])
        assert len(recorded.measured.ops) == len(recorded.predicted.ops)
        curve = recorded.measured.memory["cpu"]
        assert curve.peak_bytes <= step.plan.peak_bytes["cpu"]
    assert backend.written
    run.options["on_nan"] = "locate"
    with run.compiled(model, adamw(model), None) as step:
        assert step.fused is None
