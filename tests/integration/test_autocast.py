"""Calls under autocast and other default types get plans of their own: eager's results, casts in the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.api.matching import settings_misfit
from gascompile.core.errors import (
    CaptureError,
    InfeasiblePlanError,
    PlanMismatchError,
    UnsupportedOpError,
)

X = torch.randn(8, 64)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Softmax(-1))
    return nn.Sequential(*layers).eval()


def cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_one_compiled_model_inside_and_outside(cache: Path) -> None:
    net = model()
    with gascompile.compile(net, None, (X,), cache_dir=cache) as compiled, torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(X), net(X))
            with cast():
                found, wanted = compiled(X), net(X)
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
            with torch.autocast("cpu", dtype=torch.float16):
                assert torch.equal(compiled(X), net(X))


def test_casts_are_part_of_the_smallest_budget(cache: Path) -> None:
    net = model()
    with cast():
        with pytest.raises(InfeasiblePlanError) as error:
            gascompile.compile(net, 1, (X,), cache_dir=cache)
        budget = error.value.required_bytes
        with gascompile.compile(net, budget, (X,), cache_dir=cache) as compiled:
            assert torch.equal(compiled(X), net(X))
            assert compiled.last_run is not None
            assert compiled.last_run.peak_bytes["cpu"] <= budget


def test_layers_whose_types_differ_are_not_divided(cache: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256)).eval()
    x = torch.randn(4, 256)
    for half in (net, net.bfloat16()):
        given = x.to(next(half.parameters()).dtype)
        with cast():
            with pytest.raises(InfeasiblePlanError) as error:
                gascompile.compile(half, 1, (given,), cache_dir=cache)
            budget = error.value.required_bytes
            with gascompile.compile(half, budget, (given,), cache_dir=cache) as compiled:
                found, wanted = compiled(given), half(given)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_a_cached_plan_is_not_that_of_other_settings(cache: Path) -> None:
    net = model()
    gascompile.compile(net, None, (X,), cache_dir=cache).close()
    with cast(), gascompile.compile(net, None, (X,), cache_dir=cache) as compiled:
        assert torch.equal(compiled(X), net(X))


def test_a_bundle_is_refused_under_other_settings(cache: Path) -> None:
    net = model()
    with gascompile.compile(net, None, (X,), cache_dir=cache) as compiled:
        compiled.save(cache / "bundle")
    with gascompile.load(cache / "bundle", cache_dir=cache) as loaded:
        with (
            cast(),
            pytest.raises(PlanMismatchError, match=r"autocast on cpu to torch\.bfloat16"),
        ):
            loaded(X)
        assert torch.equal(loaded(X), net(X))
    with cast(), pytest.raises(PlanMismatchError, match="torch is set to"):
        gascompile.load(cache / "bundle", cache_dir=cache)


def test_a_bundle_made_under_autocast(cache: Path) -> None:
    net = model()
    with cast():
        with gascompile.compile(net, None, (X,), cache_dir=cache) as compiled:
            compiled.save(cache / "bundle")
        with gascompile.load(cache / "bundle", cache_dir=cache / "new") as loaded:
            assert torch.equal(loaded(X), net(X))
    with pytest.raises(PlanMismatchError, match=r"torch\.bfloat16"):
        gascompile.load(cache / "bundle", cache_dir=cache)


def test_a_bundle_that_does_not_say(cache: Path) -> None:
    with gascompile.compile(model(), None, (X,), cache_dir=cache) as compiled:
        silent = replace(compiled.plan, fingerprint={})
    assert settings_misfit(silent) is None
    with cast():
        assert settings_misfit(silent) is not None


def test_packed_weights_are_refused(cache: Path) -> None:
    with gascompile.compile(model(), None, (X,), cache_dir=cache, weights="int8") as compiled:
        compiled(X)
        with cast(), pytest.raises(UnsupportedOpError, match="int8"):
            compiled(X)
    with cast(), pytest.raises(UnsupportedOpError, match="int8"):
        gascompile.compile(model(), None, (X,), cache_dir=cache, weights="int8")


class Region(nn.Module):
    """Layers of which one is not to be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Switch autocast off for the second layer."""
        x = self.first(x).float()
        with torch.autocast("cpu", enabled=False):
            x = self.second(x)
        return self.first(x), x


def test_a_region_without_autocast_under_autocast_is_refused(cache: Path) -> None:
    net = Region().eval()
    with gascompile.compile(net, None, (X,), cache_dir=cache) as compiled:
        assert all(map(torch.equal, compiled(X), net(X)))
        with cast(), pytest.raises(UnsupportedOpError, match="switches autocast of 'cpu' off"):
            compiled(X)


class Casts(nn.Module):
    """Casts that do something under autocast alone, and one that does nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return results of several types."""
        y = self.layer(x)
        return y.float(), y.to(torch.bfloat16), y.to(x.dtype) + y, y.softmax(-1), y @ x.T


def test_casts_of_the_model_itself(cache: Path) -> None:
    net = Casts().eval()
    with gascompile.compile(net, None, (X,), cache_dir=cache) as compiled:
        for setting in (torch.no_grad(), cast()):
            with setting:
                found, wanted = compiled(X), net(X)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_the_default_dtype_of_a_call(cache: Path) -> None:
    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Add what is made in the default dtype."""
            return x + torch.ones(3)

    net, x = Made(), torch.zeros(3)
    with gascompile.compile(net, None, (x,), cache_dir=cache) as compiled:

        def check(found: torch.Tensor) -> None:
            assert found.dtype == net(x).dtype

        check(compiled(x))
        torch.set_default_dtype(torch.float64)
        try:
            check(compiled(x))
        finally:
            torch.set_default_dtype(torch.float32)
        check(compiled(x))


def test_an_encoder_layer_with_a_kernel_of_its_own_is_refused(cache: Path) -> None:
    """Its results have another type, which a trace does not show."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 4, 16)
    with gascompile.compile(net, None, cache_dir=cache) as compiled, torch.no_grad(), cast():
        with pytest.raises(CaptureError, match=r"mha\.set_fastpath_enabled\(False\)"):
            compiled(x)
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            assert torch.equal(compiled(x), net(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        with pytest.raises(CaptureError, match="kernel of its own"):
            compiled(x)
