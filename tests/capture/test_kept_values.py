"""Values that modules keep of their calls: they are copied for a trace, and nobody takes an old one for a new one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile


class Keeping(nn.Module):
    """Keeps what it computed last, for whoever looks at it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x)
        return self.last.relu()


class Lists(Keeping):
    """Keeps it where no attribute shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = {"all": [super().forward(x)]}
        return self.kept["all"][0] * 2


@pytest.mark.parametrize("kind", [Keeping, Lists])
def test_a_model_that_has_run_with_gradients_is_compiled(
    kind: type[Keeping], tmp_path: Path
) -> None:
    model, eager = kind().eval(), kind().eval()
    x = torch.randn(3, 8)
    model(x)
    before = model.last
    assert before.grad_fn is not None
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        for count in (3, 2, 3):
            assert torch.equal(compiled(x[:count]), eager(x[:count]))
    assert model.last is before


def test_what_modules_keep_of_planned_calls_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Keeping()).eval()
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled,
        torch.no_grad(),
    ):
        compiled(torch.randn(3, 8))
    assert "sets 1.last to tensors that it computes, which planned calls do not" in caplog.text
    assert not hasattr(model[1], "last")


def test_layers_that_keep_no_values_are_told_of_in_no_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.LSTM(4, 4).eval()
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled,
        torch.no_grad(),
    ):
        compiled(torch.randn(3, 2, 4))
    assert "to tensors that it computes" not in caplog.text
    assert not any("assigned during export" in str(warning.message) for warning in recwarn)
