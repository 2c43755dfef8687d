"""What callers add to a checkpoint comes back as it was, of the same types."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile import TrainingStep, compile_step
from gascompile.core.errors import CheckpointError
from gascompile.training.state.extra_values import decoded, encoded
from gascompile.training.state.run_state import read_state
from tests.training.runs import MACHINE, PLANNING_S, batches, loss_fn, new_model

Schedule = Callable[[torch.optim.Optimizer], Any]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"a": [1, 2.5, None, True, "x", {"b": {}}]},
        {"milestones": Counter({2: 1, 4: 2}), "plain": {1: "one", "1": "text", None: 0}},
        {"pair": (1, (2, [3])), "keys": {(1, 2): (3,), 0.5: []}},
        {"best": float("inf"), "worst": [-float("inf")]},
        {"$tuple": [1]},
        {"x": {"$dict": {"$counter": []}}},
        {1: 2},
        {"python": random.getstate()},
    ],
)
def test_values_come_back(extra: dict[Any, Any]) -> None:
    written, is_tagged = encoded(extra)
    read = json.loads(json.dumps(written, allow_nan=False))
    found = decoded(read) if is_tagged else read
    assert repr(found) == repr(extra)
    assert is_tagged is (json.loads(json.dumps(written)) != extra or written != extra)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([1], "extra is a list"),
        ({"a": [torch.zeros(1)]}, r"extra\['a'\]\[0\] is a Tensor"),
        ({"a": {1, 2}}, r"extra\['a'\] is a set"),
        ({"a": {1: float("nan")}}, r"extra\['a'\]\[1\] is NaN"),
        ({"a": {b"x": 1}}, r"a key of extra\['a'\] is a bytes"),
    ],
)
def test_others_are_named(extra: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        encoded(extra)


def test_what_holds_itself_is_refused() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ValueError, match="holds itself"):
        encoded({"a": around})


@pytest.mark.parametrize(
    "tag", [{"$float": "3"}, {"$tuple": 1}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}]
)
def test_damaged_tags_are_refused(tag: Any) -> None:
    with pytest.raises(ValueError, match=r"\$|unpack"):
        decoded(tag)


def started(
    folder: Path, seed: int, schedule: Schedule
) -> tuple[TrainingStep, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(
        model,
        loss_fn,
        optimizer,
        "64MiB",
        batches(1)[0],
        machine=MACHINE,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
    )
    return step, optimizer, schedule(optimizer)


def rates(step: TrainingStep, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    found = []
    for batch in batches(5):
        loss = float(step(batch))
        found.append((loss, optimizer.param_groups[0]["lr"]))
        args = (1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*args)
    return found


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [6, 6, 8], gamma=0.1),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    ],
)
def test_a_scheduler_goes_on(schedule: Schedule, tmp_path: Path) -> None:
    step, optimizer, scheduler = started(tmp_path, 0, schedule)
    with step:
        rates(step, optimizer, scheduler)
        with pytest.raises(ValueError, match="extra is a list"):
            step.save(tmp_path / "kept", [1])  # type: ignore[arg-type]
        step.save(tmp_path / "kept", {"scheduler": scheduler.state_dict()})
        expected = rates(step, optimizer, scheduler)
        state = scheduler.state_dict()
    step, optimizer, scheduler = started(tmp_path, 1, schedule)
    with step:
        scheduler.load_state_dict(step.load(tmp_path / "kept")["scheduler"])
        assert rates(step, optimizer, scheduler) == expected
        assert scheduler.state_dict() == state


def test_older_files_are_read_as_they_are(tmp_path: Path) -> None:
    step, _, _ = started(tmp_path, 0, lambda _: None)
    with step:
        kept = step.save(tmp_path / "kept", {"a": [1]})
    file = kept / "state.json"
    state = json.loads(file.read_text())
    assert "extra_tagged" not in state
    state["extra"] = {"a": {"$tuple": [1]}}
    file.write_text(json.dumps(state))
    assert read_state(kept)["extra"] == {"a": {"$tuple": [1]}}
    state["extra_tagged"] = True
    file.write_text(json.dumps(state))
    assert read_state(kept)["extra"] == {"a": (1,)}
    state["extra"] = {"a": {"$tuple": 1}}
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="damaged in extra"):
        read_state(kept)
