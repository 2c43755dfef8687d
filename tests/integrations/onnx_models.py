"""A small model that is written as ONNX, and what onnxruntime makes of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """Layers of which one is tied, a constant, a weight that is read transposed, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((64,), 0.5), persistent=False)
        self.mix = nn.Parameter(torch.randn(64, 64).t())

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids) * self.scale + shift
        x = self.second(nn.functional.silu(self.first(x))) @ self.mix
        return {"logits": self.head(x), "mean": x.mean(-1)}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


INPUTS = {"ids": torch.arange(12).reshape(2, 6), "shift": torch.linspace(-1, 1, 64)}


def by_runtime(file: Path, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    onnx.checker.check_model(str(file), full_check=True)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {n: v.numpy() for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    return [torch.from_numpy(value) for value in session.run(None, given)]


def assert_close(found: list[torch.Tensor], wanted: list[Any]) -> None:
    tensors = [value for value in wanted if isinstance(value, torch.Tensor)]
    assert len(found) == len(tensors)
    for value, expected in zip(found, tensors, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
