"""Fused ops on a GPU that is there: the results of its ops one by one, with and without graphs, also from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import gascompile
from tests import zoo
from tests.integration.fused_models import ALWAYS, Gated

pytestmark = pytest.mark.gpu


def host(outputs: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [x.cpu().clone() for x in leaves if isinstance(x, torch.Tensor)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], eps: float) -> None:
    for value, other in zip(found, wanted, strict=True):
        if other.is_floating_point():
            scale = float(other.abs().max())
            torch.testing.assert_close(value, other, rtol=0, atol=eps * scale)
        else:
            assert torch.equal(value, other)


@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2", "gemma3"])
def test_results_are_those_of_ops_one_by_one(name: str, graphs: str, kernels: Path) -> None:
    model, inputs = zoo.make(name)
    options: dict[str, Any] = {"example_inputs": inputs, "cache_dir": kernels}
    with gascompile.compile(model, None, fuse="off", graphs="off", **options) as plain:
        wanted = host(plain(**inputs))
    with gascompile.compile(model, None, graphs=graphs, **options, **ALWAYS) as fused:
        assert fused.plan.machine.compute_backend == "cuda"
        assert fused.fused is not None
        assert fused.fused.num_ops > fused.fused.num_segments > 0, fused.fused.reason
        for _ in range(4):
            assert_near(host(fused(**inputs)), wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_reduced_types_stay_within_rounding(
    dtype: torch.dtype, gated: Gated, rows: dict[str, torch.Tensor], kernels: Path
) -> None:
    model, x = gated.to(dtype), rows["x"].to(dtype)
    with gascompile.compile(model, None, (x,), cache_dir=kernels, fuse="off") as plain:
        wanted = host(plain(x))
    with gascompile.compile(model, None, (x,), cache_dir=kernels, **ALWAYS) as fused:
        assert fused.fused is not None
        assert fused.fused.num_ops > 0
        assert_near(host(fused(x)), wanted, 4 * torch.finfo(dtype).eps)


def test_a_bundle_brings_its_kernels(
    gated: Gated, rows: dict[str, torch.Tensor], kernels: Path, tmp_path: Path
) -> None:
    with gascompile.compile(gated, None, rows, cache_dir=kernels, **ALWAYS) as compiled:
        wanted = host(compiled(**rows))
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle", allow_code=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0
        assert loaded.fused.compile_s == 0
        for value, other in zip(host(loaded(**rows)), wanted, strict=True):
            assert torch.equal(value, other)
