"""Checkpoints: all of a run comes back, what is unchanged is linked, and faults leave the last one valid."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from gascompile import CheckpointError, StorageError, TrainingStep
from gascompile.runtime.run.executor import Executor
from gascompile.training.state.train_state import States
from tests.training.runs import (
    BUDGET_BYTES,
    adamw,
    batches,
    compiled,
    losses,
    new_model,
    plain_losses,
)


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[TrainingStep]:
    """Return a step whose states fit."""
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as found:
        torch.manual_seed(5)
        yield found


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


@pytest.mark.parametrize("budget", [BUDGET_BYTES, "64MiB"])
def test_a_run_goes_on_in_another_process_as_if_nothing_had_been(
    step: TrainingStep, budget: int | str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    found = losses(step, 0, 2)
    step.save(folder)
    found += losses(step, 2, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1)
    step.save(folder, {"scheduler": scheduler.state_dict()})
    losses(step, 3, 4)
    step.close()
    assert checkpoints(folder) == ["checkpoint-00000002"]
    model = new_model(2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    with compiled(model, optimizer, tmp_path, budget=budget) as other:
        assert other.load(folder) == {"scheduler": scheduler.state_dict()}
        assert other.num_steps == 3
        assert optimizer.param_groups[0]["lr"] == 3e-3
        found += losses(other, 3, 5)
        other.load(folder)  # and again, over what has been trained since
        assert losses(other, 3, 5) == found[3:]
    assert found == plain_losses(5)


def test_the_files_are_those_of_safetensors(step: TrainingStep, tmp_path: Path) -> None:
    losses(step, 0, 1)
    folder = step.save(tmp_path / "checkpoints")
    state = step.state_dict()
    model = load_file(folder / "model-trained.safetensors")
    assert set(model) == set(state["model"]) - {"head.weight"}  # tied: it is there once
    for name, value in model.items():
        assert torch.equal(value, state["model"][name])
    kept = load_file(folder / "optimizer.safetensors")
    for index, (name, _) in enumerate(new_model().named_parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kept[f"{name}:{key}"], state["optimizer"]["state"][index][key])


def test_tensors_that_never_change_are_linked(tmp_path: Path) -> None:
    model = new_model().train()
    model.embedding.weight.requires_grad_(False)
    folder = tmp_path / "checkpoints"

    def frozen() -> int:
        (file,) = folder.glob("checkpoint-*/model-frozen.safetensors")
        return file.stat().st_ino

    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        step(batches(1)[0])
        step.save(folder)
        first = frozen()
        value = step.state_dict()["model"]["embedding.weight"]
        step(batches(1)[0])
        step.save(folder)
        assert frozen() == first
        step.load(folder)
        step.save(folder)
        assert frozen() == first
        step.load_state_dict(step.state_dict())  # could have been anything
        step.save(folder)
        assert frozen() != first
        (file,) = folder.glob("checkpoint-*/model-frozen.safetensors")
        assert torch.equal(load_file(file)["embedding.weight"], value)
        assert step.load(folder) == {}


def test_what_is_out_of_memory_is_copied_by_the_file_system(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(step, 0, 2)
    copied = 0
    real = os.copy_file_range

    def counting(source: int, target: int, count: int, *places: int) -> int:
        nonlocal copied
        taken = real(source, target, min(count, 5000), *places)  # and it may take less than asked
        copied += taken
        return taken

    monkeypatch.setattr(os, "copy_file_range", counting)
    first = step.save(tmp_path / "one")
    assert copied > 500_000

    def refuse(*_: int) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    second = step.save(tmp_path / "two")
    for name in ("model-trained.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_two_jobs_do_not_share_a_folder(roomy: TrainingStep, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    losses(roomy, 0, 1)
    roomy.save(folder)
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as other:
        for refused in (other.save, other.load):
            with pytest.raises(StorageError, match=rf"process {os.getpid()}\) keeps"):
                refused(folder)
        assert checkpoints(folder) == ["checkpoint-00000001"]
        roomy.close()
        other.load(folder)
        other.save(folder)
        assert checkpoints(folder) == ["checkpoint-00000002"]


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    roomy: TrainingStep, tmp_path: Path
) -> None:
    reference = plain_losses(2)
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        roomy.load(folder)
    assert losses(roomy, 0, 1) == reference[:1]
    saved = roomy.save(folder)
    for name in ("model-trained.safetensors", "optimizer.safetensors", "state.json"):
        whole = (saved / name).read_bytes()
        middle = len(whole) // 2
        (saved / name).write_bytes(
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        )
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            roomy.load(folder)
        (saved / name).write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            roomy.load(folder)
        (saved / name).write_bytes(whole)
    assert losses(roomy, 1, 2) == reference[1:]


def test_checkpoints_of_other_runs_are_refused(roomy: TrainingStep, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    losses(roomy, 0, 1)
    roomy.save(folder)
    roomy.close()
    wider = new_model(width=96).train()
    with (
        compiled(wider, adamw(wider), tmp_path, budget="64MiB") as step,
        pytest.raises(
            CheckpointError, match=r"is float32 \[512, 64\] there and float32 \[512, 96\]"
        ),
    ):
        step.load(folder)
    model = new_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        compiled(model, optimizer, tmp_path, budget="64MiB") as step,
        pytest.raises(CheckpointError, match="of another run"),
    ):
        step.load(folder)


def test_leftovers_of_a_killed_save_are_ignored_and_removed(
    roomy: TrainingStep, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    losses(roomy, 0, 1)
    roomy.save(folder)
    (folder / ".writing-00000002").mkdir()
    (folder / ".writing-00000002" / "manifest.json").write_text("{}")
    (folder / ".old-checkpoint-00000000").mkdir()
    roomy.load(folder)
    roomy.save(folder)
    assert checkpoints(folder) == ["checkpoint-00000002"]


def test_extra_has_to_be_json(roomy: TrainingStep, tmp_path: Path) -> None:
    for extra in ({"a": torch.zeros(1)}, {"a": float("nan")}):
        with pytest.raises(ValueError, match="JSON"):
            roomy.save(tmp_path / "checkpoints", extra)
    assert not (tmp_path / "checkpoints").exists()


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("posix_fallocate", failing(errno.ENOSPC)),
        ("pwrite", failing(errno.ENOSPC)),
        ("pwrite", lambda *_: 0),
        ("fsync", failing(errno.EIO)),
        ("rename", failing(errno.EIO)),
        ("mkdir", failing(errno.ENOSPC)),
    ],
)
def test_a_save_that_fails_leaves_the_last_checkpoint(
    roomy: TrainingStep,
    call: str,
    fault: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = plain_losses(3)
    folder = tmp_path / "checkpoints"
    losses(roomy, 0, 1)
    roomy.save(folder)
    assert losses(roomy, 1, 2) == reference[1:2]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fault)
        with pytest.raises(StorageError, match="last checkpoint there is still valid"):
            roomy.save(folder)
    assert checkpoints(folder) == ["checkpoint-00000001"]
    assert losses(roomy, 2, 3) == reference[2:]  # training goes on
    roomy.load(folder)
    assert losses(roomy, 1, 3) == reference[1:]
    roomy.save(folder)
    assert checkpoints(folder) == ["checkpoint-00000002"]


def test_writes_that_take_less_than_they_are_given_are_finished(
    roomy: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:10_000], at))
    losses(roomy, 0, 1)
    roomy.save(tmp_path / "checkpoints")
    assert roomy.load(tmp_path / "checkpoints") == {}


@pytest.mark.parametrize("direction", ["_writer", "_reader"])
def test_a_failed_transfer_ends_the_run_until_a_checkpoint_is_loaded(
    step: TrainingStep, direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = plain_losses(4)
    folder = tmp_path / "checkpoints"
    assert losses(step, 0, 2) == reference[:2]
    step.save(folder)
    assert step._states is not None
    spill = step._states.persistent._spill._buffered
    real = getattr(spill, direction)
    count = 0

    def fault(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 9:
            raise OSError(errno.EIO, "the drive has failed")
        taken: int = real(*args)
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(spill, direction, fault)
        with pytest.raises(StorageError, match="the drive has failed"):
            losses(step, 2, 4)
        assert count > 9
        for refused in (lambda: step(batches(1)[0]), lambda: step.save(folder), step.state_dict):
            with pytest.raises(StorageError, match="restore the last checkpoint"):
                refused()
        with pytest.raises(StorageError, match="the drive has failed"):
            step.load(folder)
    with pytest.raises(StorageError, match="restore the last checkpoint"):
        step.eval(batches(1)[0])
    step.load(folder)
    assert losses(step, 2, 4) == reference[2:]


def test_an_interrupt_before_anything_has_changed_does_not_end_the_run(
    step: TrainingStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = plain_losses(3)
    assert losses(step, 0, 1) == reference[:1]
    random = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_interpret", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            losses(step, 1, 2)
    torch.set_rng_state(random)
    assert losses(step, 1, 3) == reference[1:]


def test_an_interrupt_between_an_update_and_its_count_is_mended_by_load(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = plain_losses(3)
    assert losses(step, 0, 1) == reference[:1]
    step.save(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(States, "stepped", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            losses(step, 1, 2)
    step.load(tmp_path / "run")
    assert losses(step, 1, 3) == reference[1:]


def test_who_is_interrupted_while_waiting_waits_again(step: TrainingStep) -> None:
    reference = plain_losses(2)
    assert losses(step, 0, 1) == reference[:1]
    (unit,) = step._units
    ticket = Mock(**{"wait.side_effect": [KeyboardInterrupt, None]})
    moves = unit.executor.mover._heap
    assert moves is not None
    moves._pending["one more"] = ticket
    with pytest.raises(KeyboardInterrupt):
        step.settle()
    step.settle()
    assert ticket.wait.call_count == 2
    assert losses(step, 1, 2) == reference[1:]


def test_a_batch_that_cannot_be_run_does_not_end_the_run(step: TrainingStep) -> None:
    reference = plain_losses(3)
    assert losses(step, 0, 1) == reference[:1]
    random = torch.get_rng_state()
    with pytest.raises(IndexError, match="out of range"):
        step(batches(1)[0] + 1000)
    torch.set_rng_state(random)
    assert losses(step, 1, 3) == reference[1:]
