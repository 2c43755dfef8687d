"""What a model's code asks of torch and of its parameters: a call after a change is planned anew, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError
from tests.training.runs import MACHINE

_MKLDNN: Any = torch.backends.mkldnn
"""Whose flags are descriptors to type checkers."""
Asks = Callable[[Any, torch.Tensor], float]


class Scaled(nn.Module):
    """Multiplies by what its code finds out."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks
        vars(self.linear.weight)["scale"] = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * self.asks(self, y)


def _settings(_model: Any, _y: torch.Tensor) -> float:
    return (
        1.0
        + torch.are_deterministic_algorithms_enabled()
        + 2 * (torch.get_float32_matmul_precision() == "medium")
        + 4 * torch.is_inference_mode_enabled()
        + 8 * torch.get_num_threads()
    )


@torch.no_grad()
def test_settings_that_the_code_asks_for_are_part_of_its_plan(tmp_path: Path) -> None:
    model, x = Scaled(_settings), torch.randn(2, 4)
    threads = torch.get_num_threads()
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path, "fuse": "off"}
    with gascompile.compile(model, "1MiB", **options) as compiled:
        try:
            assert torch.equal(compiled(x), model(x))
            torch.use_deterministic_algorithms(True)
            assert torch.equal(compiled(x), model(x))
            torch.set_float32_matmul_precision("medium")
            assert torch.equal(compiled(x), model(x))
            torch.set_num_threads(threads + 1)
            assert torch.equal(compiled(x), model(x))
            with gascompile.compile(model, "1MiB", (x,), **options) as kept:
                assert kept._gascompile.units[0].is_kept
            torch.set_num_threads(threads)
            with gascompile.compile(model, "1MiB", (x,), **options) as other:
                assert torch.equal(other(x), model(x))
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
            torch.set_num_threads(threads)
        with torch.inference_mode():
            assert torch.equal(compiled(x), model(x))


def test_what_another_answer_in_a_capture_would_decide_is_refused(tmp_path: Path) -> None:
    model = Scaled(lambda _m, _y: 2.0 if _MKLDNN.enabled else 3.0)
    with pytest.raises(CaptureError, match=r"mkldnn.enabled.* False within a capture and True"):
        gascompile.compile(model, "1MiB", (torch.randn(2, 4),), machine=MACHINE, cache_dir=tmp_path)


@pytest.mark.parametrize(
    "asks",
    [
        lambda _m, _y: 2.0 if torch.is_grad_enabled() else 3.0,
        lambda _m, y: 2.0 if y.requires_grad else 3.0,
        lambda _m, y: 2.0 if y.grad_fn is None else 3.0,
    ],
)
@pytest.mark.parametrize("is_given", [False, True])
def test_what_gradients_would_decide_is_refused_where_they_are_recorded(
    asks: Asks, tmp_path: Path, *, is_given: bool
) -> None:
    model, x = Scaled(asks), torch.randn(2, 4)
    examples = (x,) if is_given else None
    with torch.no_grad():
        compiled = gascompile.compile(
            model, "1MiB", examples, machine=MACHINE, cache_dir=tmp_path, fuse="off"
        )
    with compiled:
        for around in (torch.no_grad, nullcontext, torch.no_grad):
            with around():
                if torch.is_grad_enabled():
                    with pytest.raises(CaptureError, match=r"torch\.no_grad\(\)"):
                        compiled(x)
                else:
                    assert torch.equal(compiled(x), model(x))


def test_asking_for_gradients_is_let_go_where_it_decides_nothing(tmp_path: Path) -> None:
    model = Scaled(lambda m, _y: 2.0 if torch.is_grad_enabled() and m.training else 3.0).eval()
    x = torch.randn(2, 4)
    with gascompile.compile(
        model, "1MiB", (x,), machine=MACHINE, cache_dir=tmp_path, fuse="off"
    ) as compiled:
        (unit,) = compiled._gascompile.units
        for around in (nullcontext, torch.no_grad, nullcontext):
            with around():
                assert torch.equal(compiled(x), model(x))
        assert compiled._gascompile.units == [unit]


def _attribute(model: Scaled) -> None:
    vars(model.linear.weight)["scale"] *= 3


def _another_attribute(model: Scaled) -> None:
    vars(model.linear.bias)["shift"] = 5.0 * vars(model.linear.bias).get("shift", 1.0)


@pytest.mark.parametrize(
    ("asks", "change"),
    [
        (lambda m, _y: 2.0 if m.linear.weight.requires_grad else 3.0, nn.Module.requires_grad_),
        (lambda m, _y: m.linear.weight.scale, _attribute),
        (lambda m, _y: getattr(m.linear.bias, "shift", 2.0), _another_attribute),
    ],
)
@torch.no_grad()
def test_what_the_code_asks_of_parameters_is_part_of_its_plan(
    asks: Asks, change: Callable[[Any], object], tmp_path: Path
) -> None:
    model, x = Scaled(asks).requires_grad_(False), torch.randn(2, 4)
    with gascompile.compile(
        model, "1MiB", machine=MACHINE, cache_dir=tmp_path, fuse="off"
    ) as compiled:
        assert torch.equal(compiled(x), model(x))
        change(model)
        assert torch.equal(compiled(x), model(x))
    with gascompile.compile(
        model, "1MiB", machine=MACHINE, cache_dir=tmp_path, fuse="off"
    ) as compiled:
        change(model)
        assert torch.equal(compiled(x), model(x))


class Padded(nn.Module):
    """An encoder and the positions that count."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return y


def test_encoders_that_pack_by_values_of_a_mask_are_refused(tmp_path: Path) -> None:
    model, x = Padded().eval(), torch.randn(2, 5, 4)
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    with gascompile.compile(
        model, "1MiB", machine=MACHINE, cache_dir=tmp_path, fuse="off"
    ) as compiled:
        with pytest.raises(CaptureError, match="use_nested_tensor = False"):
            compiled(x, padding)
        torch.testing.assert_close(compiled(x), model(x))
        model.encoder.use_nested_tensor = False
        for around in (torch.no_grad, nullcontext):
            with around():
                torch.testing.assert_close(compiled(x, padding), model(x, padding))
