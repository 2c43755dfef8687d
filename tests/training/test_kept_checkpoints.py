"""Several checkpoints are kept, and made whole behind steps: what goes, what stays, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from gascompile import CheckpointError, StorageError, TrainingStep, UnsupportedOpError
from tests.training.runs import adamw, batches, compiled, losses, new_model, plain_losses


def steps_in(folder: Path) -> dict[str, int]:
    """Return the step of each checkpoint by its name."""
    return {
        path.name: json.loads((path / "state.json").read_text())["step"]
        for path in sorted(folder.glob("checkpoint-*"))
        if (path / "state.json").is_file()
    }


def test_no_checkpoint_is_written_under_a_name_that_load_overlooks(
    step: TrainingStep, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    losses(step, 0, 1)
    (folder / "checkpoint-99999999").mkdir(parents=True)
    with pytest.raises(StorageError, match="no number after checkpoint-99999999"):
        step.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-99999999", "lock"]


class Held:
    """Holds up what goes to the drive from own threads, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        caller, real = threading.get_ident(), os.fsync

        def fsync(file: int) -> None:
            if threading.get_ident() != caller:
                self.reached.set()
                assert self.go.wait(60)
                if error:
                    raise OSError(error, os.strerror(error))
            real(file)

        patch.setattr(os, "fsync", fsync)


def test_the_newest_are_kept(step: TrainingStep, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(4):
        losses(step, number, number + 1)
        step.save(folder, keep=3)
    names = [f"checkpoint-0000000{n}" for n in (2, 3, 4)]
    assert steps_in(folder) == dict(zip(names, (2, 3, 4), strict=True))
    step.save(folder, keep=2)
    assert list(steps_in(folder).values()) == [4, 4]
    step.save(folder)
    assert list(steps_in(folder)) == ["checkpoint-00000006"]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="keep="):
            step.save(folder, keep=wrong)


def test_only_what_was_written_here_is_removed(step: TrainingStep, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    losses(step, 0, 1)
    elsewhere.mkdir()
    step.save(elsewhere)
    folder.mkdir()
    (folder / "checkpoint-00000001").symlink_to(elsewhere / "checkpoint-00000001")
    (folder / ".old-checkpoint-00000001").symlink_to(elsewhere)
    (folder / ".writing-of-mine").mkdir()
    (folder / "checkpoint-00000002").mkdir()
    (folder / "checkpoint-00000002" / "weights").write_text("another library's")
    noted = step.save(folder)
    (noted / "notes.txt").write_text("mine")
    plain = step.save(folder)
    last = step.save(folder)
    assert not plain.exists()
    assert sorted(path.name for path in folder.iterdir() if path.name != "lock") == [
        ".old-checkpoint-00000001", ".writing-of-mine", "checkpoint-00000001",
        "checkpoint-00000002", noted.name, last.name,
    ]  # fmt: skip
    assert (noted / "model-trained.safetensors").is_file()
    assert (elsewhere / "checkpoint-00000001" / "manifest.json").is_file()


def test_steps_go_on_while_a_checkpoint_is_made_whole(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, folder = plain_losses(5), tmp_path / "run"
    assert losses(step, 0, 1) == reference[:1]
    step.save(folder)
    assert losses(step, 1, 2) == reference[1:2]
    with monkeypatch.context() as patch:
        held = Held(patch)
        named = step.save(folder, {"at": 2}, blocking=False)
        assert held.reached.wait(60)
        assert losses(step, 2, 5) == reference[2:]
        # It has no name yet, and the one before is still there.
        assert list(steps_in(folder).values()) == [1]
        held.go.set()
        assert step.load(folder) == {"at": 2}
    assert steps_in(folder) == {named.name: 2}
    assert losses(step, 2, 5) == reference[2:]
    for _ in range(2):
        step.save(folder, keep=2, blocking=False)  # the second waits for the first
    step.close()
    assert list(steps_in(folder).values()) == [5, 5]


def test_what_fails_behind_a_step_is_raised_by_the_next(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, folder = plain_losses(3), tmp_path / "run"
    assert losses(step, 0, 1) == reference[:1]
    step.save(folder)
    with monkeypatch.context() as patch:
        held = Held(patch, errno.ENOSPC)
        step.save(folder, blocking=False)
        held.go.set()
        with pytest.raises(StorageError, match=r"No space.*last checkpoint there is still valid"):
            step.save(folder)
    assert list(steps_in(folder)) == ["checkpoint-00000001"]
    assert not list(folder.glob(".writing-*"))
    assert losses(step, 1, 3) == reference[1:]  # it is said once
    step.load(folder)
    assert losses(step, 1, 3) == reference[1:]
    # Back to one that is not the newest, by the way that the error names.
    one = folder / "checkpoint-00000001"
    with pytest.raises(CheckpointError, match="copy it under its own name into an empty folder"):
        step.load(one)
    shutil.copytree(one, tmp_path / "back" / one.name)
    step.load(tmp_path / "back")
    assert losses(step, 1, 3) == reference[1:]
    with monkeypatch.context() as patch:
        held = Held(patch, errno.EIO)
        step.save(folder, blocking=False)
        held.go.set()
        behind = next(iter(step._holdings.folders.values()))._behind
        assert behind is not None
        behind.wait()
        with pytest.raises(StorageError, match="Input/output"):
            step(batches(1)[0])
    step.save(folder, blocking=False)


def test_close_waits_gives_values_back_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = new_model().train(), tmp_path / "run"
    step = compiled(model, adamw(model), tmp_path)
    torch.manual_seed(5)
    losses(step, 0, 1)
    wanted = step.state_dict()["model"]
    held = Held(monkeypatch, errno.EIO)
    step.save(folder, blocking=False)
    held.go.set()
    with pytest.raises(StorageError, match="Input/output"):
        step.close()
    step.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert steps_in(folder) == {}


def test_an_interrupted_save_leaves_nothing(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    losses(step, 0, 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    step.save(folder)
    files = len(os.listdir("/proc/self/fd"))
    for blocking in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step.save(folder, blocking=blocking)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-00000001", "lock"]
    assert len(os.listdir("/proc/self/fd")) == files


def test_one_process_keeps_no_replicas(step: TrainingStep, tmp_path: Path) -> None:
    losses(step, 0, 1)
    with pytest.raises(UnsupportedOpError, match="this process trains alone"):
        step.save(tmp_path / "run", replicas=2)
    with pytest.raises(ValueError, match="replicas=3"):
        step.save(tmp_path / "run", replicas=3)
    with pytest.raises(ValueError, match="this process trains alone"):
        _ = step.replica_cost
    assert not (tmp_path / "run").exists()
