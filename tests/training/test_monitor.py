"""The live line and the scalars say what was measured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

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
    kept, terminal, elsewhere = Kept(), Terminal(), io.StringIO()
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
        with Monitor(step, stream=elsewhere) as monitor:
            monitor(loss)
    assert f"loss {float(loss):.4f}" in terminal.getvalue()
    assert "step 2" in terminal.getvalue()
    assert elsewhere.getvalue() == ""  # no terminal


def test_a_line_by_hand() -> None:
    found = {
        "loss": 1.25,
        "time_s": 0.5,
        "stall_s": 0.125,
        "peak_bytes/cpu": float(3 << 20),
        "moved_bytes/nvme->cpu": float(1 << 20),
        "moved_bytes/cpu->nvme": 0.0,
        "lr/0": 0.1,
    }
    assert line(7, found) == (
        "step 7  loss 1.2500  500 ms a step  waiting 25%  cpu 3.00 MiB  nvme->cpu 2.00 MiB/s"
    )
