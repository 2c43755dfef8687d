"""DCP's own functions on a model and an optimizer whose values an open step has: whole values, or a typed refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gascompile import TrainingStep
from gascompile.core.errors import OpenStepError
from gascompile.training.dcp import CheckpointReader, CheckpointWriter
from tests.training.runs import adamw, batches, compiled, new_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> TrainingStep:
    model = new_model().train()
    found = compiled(model, adamw(model), tmp_path_factory.mktemp("run"))
    found(batches(1)[0])
    return found


def test_the_model_s_state_is_whole_and_is_taken_over(step: TrainingStep) -> None:
    before = step.state_dict()["model"]
    found: dict[str, Any] = get_model_state_dict(step._model)
    assert set(found) <= set(before)
    for name, value in found.items():
        assert torch.equal(value, before[name])
    wanted = {name: value + 1 for name, value in found.items()}
    set_model_state_dict(step._model, wanted)
    after = step.state_dict()["model"]
    assert all(torch.equal(after[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("function", [get_optimizer_state_dict, get_state_dict])
def test_an_optimizer_s_state_by_dcp_is_refused_and_costs_nothing(
    step: TrainingStep, function: object
) -> None:
    before = step.state_dict()
    with pytest.raises(OpenStepError):
        function(step._model, step.optimizer)  # type: ignore[operator]
    after = step.state_dict()
    for name, value in before["model"].items():
        assert torch.equal(after["model"][name], value)
    for index, entry in before["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(after["optimizer"]["state"][index][key], value)
    assert torch.isfinite(step(batches(1)[0]))


@pytest.mark.parametrize("is_own", [False, True])
def test_saved_by_dcp_and_loaded_again(step: TrainingStep, tmp_path: Path, *, is_own: bool) -> None:
    writer = CheckpointWriter(tmp_path) if is_own else FileSystemWriter(tmp_path)
    reader = CheckpointReader(tmp_path) if is_own else FileSystemReader(tmp_path)
    saved = step.state_dict()["model"]
    save({"model": step._model}, storage_writer=writer)
    step(batches(2)[1])
    load({"model": step._model}, storage_reader=reader)
    after = step.state_dict()["model"]
    assert all(torch.equal(after[name], value) for name, value in saved.items())
