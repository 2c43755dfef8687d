"""Exported programs as sources: positional and keyword arguments reach the program as they were exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gascompile
from gascompile.cli import app
from gascompile.core.errors import FormatError, UnsupportedOpError

BUDGET = "384KiB"
# torch warns of itself where it copies the graph of an exported program.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Two(nn.Module):
    """Takes ``x`` by position, ``scale`` by name alone and ``shift`` either way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(
        self, x: torch.Tensor, shift: torch.Tensor | None = None, *, scale: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        # Neither of the two may be taken for the other.
        return {"out": x * scale, "sum": x + (2 * scale if shift is None else shift)}


def exported(path: Path, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        torch.export.save(torch.export.export(Two().eval(), args, kwargs), path)
    return path


X, SHIFT, SCALE = torch.randn(4, 128), torch.full((4, 128), 3.0), torch.full((4, 128), 0.5)
CALLS = {
    "scale by name": ((X,), {"scale": SCALE}),
    "two by position": ((X, SHIFT), {"scale": SCALE}),
    "all by name": ((), {"x": X, "shift": SHIFT, "scale": SCALE}),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which this machine is remembered, so that it is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("call", CALLS)
def test_a_pt2_file_runs_like_eager(call: str, tmp_path: Path, cache: Path) -> None:
    source = exported(tmp_path / "two.pt2", *CALLS[call])
    args = ["run", str(source), "--budget", BUDGET, "--check", "--cache-dir", str(cache), "--json"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["check"]["bit_identical"]
    assert data["run"]["peak_bytes"]["cpu"] <= 384 << 10


def test_a_pt2_file_is_planned(tmp_path: Path) -> None:
    source = exported(tmp_path / "two.pt2", *CALLS["two by position"])
    plan = gascompile.plan(source, BUDGET, "cpu-nvme")
    weights = [t for t in plan.tensors.values() if t.kind == "weight"]
    assert sum(weight.size_bytes for weight in weights) == 6 * (128 * 128 + 128) * 4
    assert {weight.home for weight in weights} == {"cpu", "nvme"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"{}"])
def test_what_is_no_exported_program_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "two.pt2"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"two\.pt2 is not a \.pt2 file"):
        gascompile.plan(path, BUDGET, "cpu-nvme")


def test_a_missing_or_truncated_pt2_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"gone\.pt2' is not a \.pt2 file: there is none"):
        gascompile.plan(tmp_path / "gone.pt2", BUDGET, "cpu-nvme")
    source = exported(tmp_path / "two.pt2", *CALLS["scale by name"])
    raw = source.read_bytes()
    source.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FormatError, match=r"two\.pt2 is not a \.pt2 file"):
        gascompile.plan(source, BUDGET, "cpu-nvme")


class Alike(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + y.sum(0) + (1 if x.shape[0] == y.shape[0] else 2)


def test_a_program_for_some_of_its_sizes_is_refused(tmp_path: Path) -> None:
    sizes = {name: {0: torch.export.Dim(name, min=2, max=9)} for name in "xy"}
    inputs = torch.randn(3, 4), torch.randn(5, 4)
    program = torch.export.export(Alike(), inputs, dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "alike.pt2")
    with pytest.raises(UnsupportedOpError, match="alone where"):
        gascompile.plan(tmp_path / "alike.pt2", BUDGET, machine="cpu-nvme", cache_dir=tmp_path)
