"""The live line and the scalars say what was measured."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import GASCompileError
from gascompile.training.monitor import Monitor, line
from tests.training.runs import adamw, batches, compiled, new_model


class Terminal(io.StringIO):
    """Takes what is shown."""

    def isatty(self) -> bool:
        return True


class Kept:
    """Takes scalars as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.found[tag, global_step] = scalar_value


def test_each_step_is_shown_and_kept(tmp_path: Path) -> None:
    model = new_model().train()
    kept, terminal = Kept(), Terminal()
    elsewhere, printed = io.StringIO(), io.StringIO()
    with compiled(model, adamw(model), tmp_path) as step:
        with pytest.raises(ValueError, match="no step has run"):
            Monitor(step)(torch.zeros(()))
        with Monitor(step, writer=kept, stream=terminal) as monitor:
            for number, batch in enumerate(batches(2), 1):
                loss = step(batch)
                monitor(loss)
                assert step.last_run is not None
                assert kept.found["train/loss", number] == float(loss)
                assert kept.found["train/lr/0", number] == 3e-3
                moved = kept.found["train/moved_bytes/nvme->cpu", number]
                assert moved == step.last_run.link_bytes["nvme->cpu"] > 0
                share = kept.found["train/share_of_limit", number]
                assert share == step.last_run.share_of_limit
        with Monitor(step, stream=elsewhere) as monitor:
            monitor(loss)
        with Monitor(step, stream=printed, every=2) as monitor:
            for _ in range(5):
                monitor(loss)
    assert f"loss {float(loss):.4f}" in terminal.getvalue()
    assert "step 2" in terminal.getvalue()
    assert elsewhere.getvalue() == ""  # no terminal
    assert printed.getvalue().count("step 2  loss") == 2


def test_a_folder_of_logs_needs_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path) as step:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(GASCompileError, match="pip install tensorboard"):
            Monitor(step, log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_event_files_hold_what_was_measured(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = new_model().train()
    losses = []
    with compiled(model, adamw(model), tmp_path) as step:
        with Monitor(step, log_dir=tmp_path / "logs") as monitor:
            for batch in batches(3):
                losses.append(step(batch))
                monitor(losses[-1])
        assert step.last_run is not None
        peak_bytes = step.last_run.peak_bytes["cpu"]
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    events = found.Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == [float(loss) for loss in losses]
    assert found.Scalars("train/peak_bytes/cpu")[-1].value == peak_bytes


def test_a_line_by_hand() -> None:
    found = {
        "loss": 1.25,
        "time_s": 0.5,
        "stall_s": 0.125,
        "share_of_limit": 0.8,
        "peak_bytes/cpu": float(3 << 20),
        "moved_bytes/nvme->cpu": float(1 << 20),
        "moved_bytes/cpu->nvme": 0.0,
        "lr/0": 0.1,
    }
    assert line(7, found) == (
        "step 7  loss 1.2500  500 ms a step  80% of the limit  waiting 25%  "
        "cpu 3.00 MiB  nvme->cpu 2.00 MiB/s"
    )
