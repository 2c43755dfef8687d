"""Models whose activations alone exceed the budget: long skip connections leave memory and come back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, StorageError
from gascompile.core.sizes import MIB, SPILL_BUFFER_BYTES
from gascompile.core.steps import Offload, Reload
from tests.allocator import peak_growth_bytes


class Ladder(nn.Module):
    """Results that are made going down and read, last first, going up; and views of them."""

    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x.transpose(0, 1))
        for layer in self.up:
            x = layer(x) + kept.pop().transpose(0, 1)
        return x


ROWS = 8192
"""A result takes 2 MiB: large enough to leave."""


PLANNING_S = 1.0
"""Nothing here asks how fast a plan is."""


def build(
    case: tuple[Ladder, torch.Tensor], budget: int | str | Budget, cache: Path
) -> gascompile.CompiledModel:
    model, x = case
    return gascompile.compile(
        model, budget, example_inputs=(x,), cache_dir=cache, time_limit_s=PLANNING_S
    )


@pytest.fixture(scope="module")
def case() -> tuple[Ladder, torch.Tensor]:
    torch.manual_seed(0)
    return Ladder().eval(), torch.randn(ROWS, 64)


@pytest.fixture(scope="module")
def smallest(case: tuple[Ladder, torch.Tensor], kernels: Path) -> int:
    """Return the smallest budget of the case."""
    with pytest.raises(InfeasiblePlanError) as refused:
        build(case, 1, kernels)
    return refused.value.required_bytes


@pytest.mark.parametrize("extra_bytes", [0, MIB, 3 * MIB])
def test_results_are_eager_and_the_peak_is_kept(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path, extra_bytes: int
) -> None:
    model, x = case
    with torch.no_grad():
        expected = model(x)
    budget = smallest + extra_bytes
    with build(case, budget, cache) as compiled:
        assert any(isinstance(step, Offload) for step in compiled.plan.steps)
        assert any(isinstance(step, Reload) for step in compiled.plan.steps)
        # All kept results together would not fit.
        assert 6 * x.nbytes > budget
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
        report = compiled.last_run
        assert report is not None
        assert report.peak_bytes["cpu"] <= budget
        assert dict(report.link_bytes) == dict(compiled.plan.link_bytes)
        arena = compiled.plan.arena_bytes["cpu"]
        assert peak_growth_bytes(lambda: compiled(x)) <= budget - arena


def test_one_byte_less_is_refused(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path
) -> None:
    with pytest.raises(InfeasiblePlanError):
        build(case, smallest - 1, cache)


@pytest.mark.parametrize("room_bytes", [0, 4 * MIB])
def test_a_small_disk_asks_for_more_memory(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path, room_bytes: int
) -> None:
    model, x = case
    weights_bytes = sum(weight.nbytes for weight in model.parameters())

    def within(size_bytes: int) -> gascompile.CompiledModel:
        budget = Budget(cpu=size_bytes, nvme=weights_bytes + room_bytes)
        return build(case, budget, cache)

    with pytest.raises(InfeasiblePlanError) as refused:
        within(smallest)
    with within(refused.value.required_bytes) as compiled, torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    with pytest.raises(InfeasiblePlanError):
        within(refused.value.required_bytes - 1)


def test_with_room_for_all_nothing_moves(case: tuple[Ladder, torch.Tensor], cache: Path) -> None:
    model, x = case
    with build(case, "64MiB", cache) as compiled:
        assert not any(isinstance(step, Offload) for step in compiled.plan.steps)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))


def test_a_disk_that_fails_in_between_is_an_error_and_the_next_run_is_right(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    broken = [False]
    write: Callable[[int, memoryview, int], int] = os.pwrite

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        if broken[0]:
            raise OSError(28, os.strerror(28))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with build(case, smallest, cache) as compiled:
        broken[0] = True
        with pytest.raises(StorageError, match="moving"):
            compiled(x)
        broken[0] = False
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))


def test_a_bundle_moves_them_too(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path, tmp_path: Path
) -> None:
    model, x = case
    with build(case, smallest, cache) as compiled:
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle") as loaded, torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_what_moves_goes_to_the_cache_folder(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path
) -> None:
    (cache / "spill").touch()
    with pytest.raises(StorageError, match=str(cache / "spill")):
        build(case, smallest, cache)


def test_the_buffers_are_in_the_arena(
    case: tuple[Ladder, torch.Tensor], smallest: int, cache: Path
) -> None:
    with build(case, smallest, cache) as compiled:
        assert compiled.plan.arena_bytes["cpu"] >= 2 * SPILL_BUFFER_BYTES
