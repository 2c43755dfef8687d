"""Models and inputs that are no plain arrays of numbers, and configurations without sense: typed errors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gascompile
from gascompile.api.sources import open_source
from gascompile.capture.plain_tensors import require_plain_inputs, require_plain_model
from gascompile.core.errors import CaptureError, CheckpointError
from tests.training.trials import MACHINE


class Holds(nn.Module):
    """A module with one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", value)


@pytest.mark.parametrize(
    "value", [torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()], ids=str
)  # fmt: skip
def test_tensors_without_plain_bytes(value: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="'held' is a tensor of the layout"):
        require_plain_model(Holds(value))
    with pytest.raises(CaptureError, match=r"the input \[0\]\[0\] is a tensor of the layout"):
        require_plain_inputs((value,), {})


class Computes(nn.Module):
    """A module with a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sparse = nn.Linear(4, 4), torch.eye(4).to_sparse()

    def forward(self, x: torch.Tensor) -> Any:
        return torch.sparse.mm(self.sparse, self.layer(x))


class Given(nn.Module):
    """Calls what it is given."""

    def forward(self, x: torch.Tensor, part: nn.Module) -> Any:
        return part(x)


def test_what_a_call_finds_or_is_given(tmp_path: Path) -> None:
    cases: list[tuple[nn.Module, tuple[Any, ...], str]] = [
        (Computes(), (torch.eye(4),), "'sparse', which the model computes with, is a tensor of the layout"),
        (Given(), (torch.eye(4), nn.ReLU()), "is a ReLU, whose weights a plan would not know"),
    ]  # fmt: skip
    for model, args, said in cases:
        with pytest.raises(CaptureError, match=said):
            gascompile.compile(model.eval(), "8MiB", args, machine=MACHINE, cache_dir=tmp_path)


def curve(x: torch.Tensor) -> torch.Tensor:
    """Return something."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.5))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted: Any = torch.jit.script(curve)


class Scripted(nn.Module):
    """Calls a function that is compiled already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = scripted(x)
        return made


def test_a_scripted_function(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 8)
    model = Scripted()
    with gascompile.compile(model, "8MiB", (x,), machine=MACHINE, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(x), model(x))


def test_plain_ones_pass() -> None:
    require_plain_model(nn.Linear(2, 2))
    require_plain_inputs((torch.eye(2), "text", None), {"x": torch.eye(2).t()})


def test_compiled_modules() -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(nn.Linear(2, 2), (torch.eye(2),), check_trace=False)
    with pytest.raises(CaptureError, match="the model is a ScriptModule"):
        require_plain_model(traced)
    with pytest.raises(CaptureError, match="the part '0' of the model is a ScriptModule"):
        require_plain_model(nn.Sequential(traced))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", -5), ("hidden_size", "x"), ("num_attention_heads", 0), ("vocab_size", None), ("dtype", "int8"),
        ("model_type", []), ("hidden_act", "nothing"),
        ("max_position_embeddings", -1),
    ],
)  # fmt: skip
def test_configurations_without_sense(tmp_path: Path, field: str, value: Any) -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20,
        architectures=["LlamaForCausalLM"],
    ).to_dict()  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_source(tmp_path)
