"""Large products by oneDNN: where fusing may round, within the memory that the plan has, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.runtime.kernels import onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here"
)
ROWS = 3


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return two large layers with a small one between them, where oneDNN counts as faster."""
    monkeypatch.setattr(onednn, "is_faster_here", lambda: True)
    torch.manual_seed(0)
    sizes = ((1024, 512), (512, 64), (64, 512), (512, 1024))
    return nn.Sequential(*(nn.Linear(*size) for size in sizes)).eval()


def x_of(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.children():
        assert isinstance(layer, nn.Linear)
        x = onednn.linear(x, layer.weight, layer.bias)
    return x


def test_products_are_its_own_within_every_budget(model: nn.Module, tmp_path: Path) -> None:
    """Peaks are counted by the allocator, and what a product takes for itself is among them."""
    x = x_of()
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, (x,), cache_dir=tmp_path)
    enough_bytes = error.value.required_bytes + onednn.scratch_bytes()
    for budget in (enough_bytes, "64MiB"):
        with gascompile.compile(model, budget, (x,), cache_dir=tmp_path) as compiled:
            with torch.no_grad():
                wanted = by_hand(model, x)
                for _ in range(2):
                    assert torch.equal(compiled(x), wanted)
                torch.testing.assert_close(wanted, model(x))
            report, plan = compiled.last_run, compiled.plan
            assert report is not None
            assert report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"]
            large = [op for op in plan.workload.ops if op.workspace_bytes >= onednn.scratch_bytes()]
            assert len(large) == 2


def test_a_budget_that_torchs_own_keep_is_no_less_feasible(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many threads take more than the rest of a plan."""
    monkeypatch.setattr(onednn, "scratch_bytes", lambda: 64 << 20)
    x = x_of()
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, (x,), cache_dir=tmp_path, fuse="off")
    budget = error.value.required_bytes
    for _ in range(2):
        with gascompile.compile(model, budget, (x,), cache_dir=tmp_path) as compiled:
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled.last_run is not None
            assert compiled.last_run.peak_bytes["cpu"] <= budget
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, budget - 1, (x,), cache_dir=tmp_path)
    assert error.value.required_bytes == budget


@pytest.mark.parametrize("fuse", ["exact", "off"])
def test_bits_are_those_of_eager_where_they_are_asked_for(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuse: str
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a product of oneDNN")

    monkeypatch.setattr(onednn, "_product", lambda: refuse)
    x = x_of()
    with gascompile.compile(model, None, (x,), cache_dir=tmp_path, fuse=fuse) as compiled:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
        ops = compiled.plan.workload.ops
        assert not any(op.workspace_bytes >= onednn.scratch_bytes() for op in ops)


def test_a_bundle_runs_with_them_where_they_are_faster_and_fit(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = x_of()
    with torch.no_grad():
        wanted, plain = by_hand(model, x), model(x)
    with gascompile.compile(model, None, (x,), cache_dir=tmp_path / "cache") as compiled:
        compiled.save(tmp_path / "bundle")
    products: list[object] = []
    own = onednn.linear

    def noted(*values: torch.Tensor) -> torch.Tensor:
        products.append(None)
        return own(*values)

    monkeypatch.setattr(onednn, "linear", noted)
    with gascompile.load(tmp_path / "bundle") as loaded:
        assert torch.equal(loaded(x), wanted)
    assert len(products) == 2
    # With more threads they would take more than the plan has for them.
    enough = onednn.scratch_bytes()
    monkeypatch.setattr(onednn, "scratch_bytes", lambda: enough + 1)
    with gascompile.load(tmp_path / "bundle") as loaded:
        torch.testing.assert_close(loaded(x), plain)
    monkeypatch.setattr(onednn, "scratch_bytes", lambda: enough)
    monkeypatch.setattr(onednn, "is_faster_here", lambda: False)
    with gascompile.load(tmp_path / "bundle") as loaded:
        torch.testing.assert_close(loaded(x), plain)
    assert len(products) == 2
