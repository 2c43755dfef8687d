"""Steps with CUDA graphs on the stand-in for a GPU: eager's losses, whatever moves between the graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile import TrainingStep
from gascompile.core.budget import Budget
from gascompile.core.plan import Plan
from gascompile.core.reports import GraphReport
from gascompile.core.steps import Offload, Reload
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.memory.host_slots import HOST_BYTES
from gascompile.training import units
from gascompile.training.planning.step_plan import step_plan
from tests.runtime.devices.fake_cuda import FakeApi
from tests.training.devices import SMALL, on_device
from tests.training.runs import adamw, batches, new_model, plain_losses

ROOMY = Budget(gpu=1 << 24, cpu=HOST_BYTES + 350_000)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "device_for", lambda _: CudaDevice(api=FakeApi()))


def begun(folder: Path, budget: Budget) -> TrainingStep:
    model = new_model().train()
    step = on_device(model, adamw(model), folder, budget=budget, graphs="auto")
    torch.manual_seed(5)
    return step


def reported(step: TrainingStep) -> GraphReport:
    assert step.graphs is not None
    return step.graphs


def test_a_step_whose_values_stay_is_captured_and_replayed(tmp_path: Path) -> None:
    with begun(tmp_path, ROOMY) as step:
        assert [float(step(batch)) for batch in batches(6)] == plain_losses(6)
        report = reported(step)
        assert report.num_graphs > 0
        assert report.num_ops > report.num_all_ops // 2


@pytest.fixture
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans for a small budget run in a large one."""

    def with_room(*args: Any, **kwargs: Any) -> Plan:
        found = step_plan(*args, **kwargs)
        return found.with_accounts(budget_bytes={**found.budget_bytes, "gpu": 1 << 24})

    monkeypatch.setattr("gascompile.training.planning.step_plan.step_plan", with_room)


@pytest.mark.usefixtures("_room")
def test_ops_beside_values_that_move_are_no_part_of_graphs(tmp_path: Path) -> None:
    with begun(tmp_path, SMALL) as step:
        assert step.plan is not None
        assert any(isinstance(s, (Offload, Reload)) for s in step.plan.steps)
        assert [float(step(batch)) for batch in batches(6)] == plain_losses(6)
        report = reported(step)
        assert 0 < report.num_ops < report.num_all_ops


def moved_elsewhere(step: TrainingStep) -> list[torch.Tensor]:
    """Move all that the step has in memory to other addresses; return what lies at the old ones."""
    states = step._states
    assert states is not None
    taken = []
    for name, tensor in states.persistent.tensors.items():
        storage = tensor.untyped_storage()
        if states.persistent.is_away(name) or not storage.nbytes():
            continue
        before, kept = tensor.data_ptr(), tensor.clone()
        num_bytes = storage.nbytes()
        while tensor.data_ptr() == before:
            storage.resize_(0)
            taken.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
            storage.resize_(num_bytes)
        tensor.copy_(kept)
    return taken


@pytest.mark.usefixtures("_room")
def test_graphs_are_captured_again_where_others_have_moved_what_they_read(tmp_path: Path) -> None:
    with begun(tmp_path, SMALL) as step:
        losses = [float(step(batch)) for batch in batches(8)[:4]]
        assert reported(step).num_graphs > 0
        state = torch.get_rng_state()
        step.eval(batches(1)[0])
        torch.set_rng_state(state)
        losses += [float(step(batch)) for batch in batches(8)[4:6]]
        step.settle()
        with torch.no_grad():
            taken = moved_elsewhere(step)
        assert taken
        losses += [float(step(batch)) for batch in batches(8)[6:]]
        assert losses == plain_losses(8)
        assert reported(step).num_graphs > 0


def test_without_room_a_step_runs_op_by_op(tmp_path: Path) -> None:
    with begun(tmp_path, SMALL) as step:
        assert [float(step(batch)) for batch in batches(4)] == plain_losses(4)
        assert reported(step).num_graphs == 0
        assert "budget" in reported(step).reason
        assert step.last_run is not None
        assert step.last_run.peak_bytes["gpu"] <= 850_000
