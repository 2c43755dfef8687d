"""Ops that torch writes in terms of others while it traces are what eager runs, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.training.capture.own_kernels import own_kernels
from tests.training.trials import Loss, Trial

Layer = Callable[[torch.Tensor], torch.Tensor]


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    value: torch.Tensor = (found[0] if isinstance(found, tuple) else found).pow(2).mean()
    return value


def trial(model: nn.Module, folder: Path, *shape: int) -> Trial:
    return Trial(model.train(), square, [torch.randn(shape) for _ in range(3)], folder)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "bidirectional": True}])
def test_recurrent_layers_are_eager(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = trial(nn.RNN(6, 8, num_layers=2, **options), tmp_path, 3, 2, 6)
    run.planned().assert_equals(run.eager())


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "bidirectional": True}])
def test_gates_of_a_gru_are_eager(width: int, options: dict[str, Any], tmp_path: Path) -> None:
    """But for rounding: eager computes gates in place, in the rows of one matrix.

    How many values of a row fill whole vectors, whose sigmoid and tanh round otherwise than those of what is left
    over, depends on the width and on the processor.
    """
    torch.manual_seed(0)
    run = trial(nn.GRU(6, width, num_layers=2, **options), tmp_path, 3, 2, 6)
    run.planned().assert_close(run.eager(), 1e-5)


def test_dropout_between_the_layers_of_a_fused_network_is_eager(tmp_path: Path) -> None:
    """But for rounding, as eager runs a kernel of its own."""
    torch.manual_seed(0)
    run = trial(nn.LSTM(6, 8, num_layers=2, dropout=0.4), tmp_path, 3, 2, 6)
    run.planned().assert_close(run.eager(), 1e-5)


class Filtered(nn.Module):
    """A convolution and what is done with its result."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.convolve, self.layers = nn.Conv2d(2, 3, 3), layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolve(x)
        for layer in self.layers:
            x = layer(x)
        return x


def scaled(mode: str, **options: bool) -> Layer:
    return lambda x: functional.interpolate(x, scale_factor=1.7, mode=mode, **options)


def test_other_sizes_of_images_are_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (
        scaled("bilinear"),
        scaled("nearest"),
        scaled("bicubic", align_corners=True),
        scaled("nearest-exact"),
        lambda x: functional.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True),
    )
    run = trial(Filtered(*layers), tmp_path, 2, 2, 6, 7)
    run.planned().assert_equals(run.eager())


def test_activations_and_losses_are_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 2])
    layers: tuple[Layer, ...] = (
        functional.hardshrink,
        functional.softshrink,
        lambda x: x + functional.multi_margin_loss(x.mean((2, 3)), labels),
        lambda x: (
            x + functional.multilabel_margin_loss(x.mean((2, 3)), labels[:, None].expand(2, 3))
        ),
    )
    run = trial(Filtered(*layers), tmp_path, 2, 2, 6, 7)
    run.planned().assert_equals(run.eager())


class Dropped(nn.Module):
    """Dropout of several rates, of a tensor that lies across memory and of an expanded one too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.one(x), 0.04)
        x = functional.dropout(self.two(x).t(), 0.15).t()
        x = functional.dropout(x.unsqueeze(0).expand(3, -1, -1), 0.42).sum(0)
        return functional.dropout(functional.dropout(x, 0.0), 0.71)


def under_autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square(model, batch)


@pytest.mark.parametrize("loss_fn", [square, under_autocast])
def test_dropout_is_eager(loss_fn: Loss, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dropped().train()
    run = Trial(model, loss_fn, [torch.randn(40, 6) for _ in range(3)], tmp_path)
    run.planned().assert_equals(run.eager())
    result = run.planned(run.smallest_budget())
    result.assert_equals(run.eager())
    assert result.plan is not None
    masks = [t for t in result.plan.workload.tensors if t.name.startswith("%native_dropout.1")]
    assert [t.size_bytes for t in masks] == [40 * 24]


def test_torch_has_its_bodies_back() -> None:
    ops = [torch.ops.aten.gru.input, torch.ops.aten.upsample_bilinear2d.vec]
    before = [dict(op.py_kernels) for op in ops]
    assert all(before)
    with own_kernels():
        assert not any(op.py_kernels for op in ops)
    assert [dict(op.py_kernels) for op in ops] == before
