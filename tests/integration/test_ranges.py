"""Calls that differ in sizes: one plan for a range of them from the second on, within the budget, as in eager mode."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.api import runner
from gascompile.core.errors import CaptureError


class Attention(nn.Module):
    """Takes what encoders take: numbers and a mask of the same two sizes, and something of a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.positions = nn.Embedding(100, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """Return [batch, tokens, 16]."""
        where = self.positions(torch.arange(ids.shape[1]))
        found = self.mix(self.table(ids) + where, src_key_padding_mask=mask)
        return torch.as_tensor(found * scale + bias.sum())


def inputs(batch: int, tokens: int, other: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[:, tokens // 2 + 1 :] = True
    ids = torch.randint(0, 50, (batch, tokens), generator=generator)
    return {"ids": ids, "mask": mask, "bias": torch.randn(other, generator=generator)}


@pytest.fixture
def model() -> Attention:
    torch.manual_seed(0)
    return Attention().eval()


@pytest.fixture
def compiled(model: Attention, cache: Path) -> Iterator[Any]:
    with gascompile.compile(model, "2MiB", machine="cpu-nvme", cache_dir=cache) as found:
        yield found


def check(compiled: Any, model: nn.Module, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch), model(**batch), rtol=0, atol=1e-6)
    assert compiled.last_run.peak_bytes["cpu"] <= compiled.plan.peak_bytes["cpu"] <= 2 << 20


def num_plans(compiled: Any) -> int:
    return len(compiled._gascompile.units)


def ranges(compiled: Any) -> list[list[tuple[int, int] | int]]:
    """Return the sizes that the newest plan is for, by argument."""
    return [
        [d if isinstance(d, int) else (d.minimum, d.maximum) for d in spec.shape]
        for spec in compiled.program.inputs
        if spec.dtype is not None
    ]


def test_sizes_that_change_get_a_range(
    compiled: Any, model: Attention, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gascompile.api.runner")
    for tokens in (12, 9, 16, 2, 11):
        check(compiled, model, inputs(4, tokens))
    assert ranges(compiled) == [[4, (2, 16)], [4, (2, 16)], [3]]
    assert num_plans(compiled) == 1
    for batch in (3, 2, 4):
        check(compiled, model, inputs(batch, 5))
    assert ranges(compiled)[0] == [(2, 4), (2, 16)]
    check(compiled, model, inputs(4, 17))
    assert ranges(compiled)[0] == [(2, 4), (2, 32)]
    assert num_plans(compiled) == 1
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("plan ")]
    assert len(lines) == 4
    assert "ids [4, 12]" in lines[0]
    assert "captured and planned in" in lines[0]
    assert "of 2.00 MiB" in lines[0]
    assert "in 2..16" in lines[1]


def test_sizes_of_one_are_planned_apart(compiled: Any, model: Attention) -> None:
    for batch, tokens in ((1, 8), (2, 8), (1, 7), (3, 6), (1, 3)):
        check(compiled, model, inputs(batch, tokens))
    assert num_plans(compiled) == 2


def test_a_bound_of_the_model_ends_a_range(compiled: Any, model: Attention) -> None:
    """Only 100 positions are there: a range up to 128 is no way out."""
    for tokens in (60, 70, 65):
        check(compiled, model, inputs(2, tokens))
    with pytest.raises((IndexError, RuntimeError, gascompile.GASCompileError)):
        compiled(**inputs(2, 101))
    check(compiled, model, inputs(2, 64))


def test_a_model_of_one_size_keeps_plans_of_their_own(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] % 2 else x * 3

    compiled: Any = gascompile.compile(Odd(), "1MiB", machine="cpu-nvme", cache_dir=cache)
    for rows in (4, 5, 6, 7, 4):
        x = torch.ones(rows, 2)
        assert torch.equal(compiled(x), x * (2 if rows % 2 else 3))
    assert num_plans(compiled) == 4


def test_there_are_no_more_plans_than_a_few(
    model: Attention, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "MOST_PLANS", 2)
    compiled: Any = gascompile.compile(
        model, "2MiB", machine="cpu-nvme", cache_dir=cache, dynamic_shapes=False
    )
    for tokens in (5, 6, 5, 7):
        check(compiled, model, inputs(2, tokens))
    assert num_plans(compiled) == 2
    # The one used least lately went.
    assert "ids [2, 6]" in caplog.text
    assert "is dropped" in caplog.text
    caplog.clear()
    check(compiled, model, inputs(2, 6))
    assert "from the cache" in compiled._gascompile.units[-1].in_words("", 0.0)


def test_a_range_that_does_not_fit_the_budget_is_no_error(model: Attention, cache: Path) -> None:
    def smallest(tokens: int) -> int:
        with pytest.raises(gascompile.InfeasiblePlanError) as error:
            gascompile.compile(
                model, 1, example_inputs=inputs(8, tokens), machine="cpu-nvme", cache_dir=cache
            )
        return error.value.required_bytes

    budget = smallest(33)
    assert budget < smallest(64)
    compiled: Any = gascompile.compile(model, budget, machine="cpu-nvme", cache_dir=cache)
    for tokens in (20, 33, 21):
        check(compiled, model, inputs(8, tokens))
    assert ranges(compiled)[0] == [8, (2, 33)]


def test_another_budget_is_planned_of_the_kept_capture_of_a_range(
    model: Attention, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(budget: str, folder: Path) -> Any:
        one: Any = gascompile.compile(model, budget, machine="cpu-nvme", cache_dir=folder)
        for batch, tokens in ((4, 12), (3, 9), (2, 16), (4, 2)):
            check(one, model, inputs(batch, tokens))
        return one

    called("2MiB", cache).close()
    new = called("1500KiB", cache.with_name("fresh"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr("gascompile.capture.export.capture", refuse)
    kept = called("1500KiB", cache)
    with kept, new:
        assert ranges(kept) == ranges(new) == [[(2, 4), (2, 16)], [(2, 4), (2, 16)], [3]]
        assert kept.plan.workload == new.plan.workload
        assert kept.plan.steps == new.plan.steps


class Square(nn.Module):
    """Does one thing where two sizes are equal, another where not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.layer(x).sum(0) + y.sum(0)
        return both + 1 if x.shape[0] == y.shape[0] else both


@pytest.mark.parametrize("order", [[(3, 5), (5, 3), (4, 4), (7, 7)], [(3, 3), (4, 4), (5, 6)]])
def test_what_two_sizes_decide_together_is_eagers(
    cache: Path, order: list[tuple[int, int]]
) -> None:
    model = Square().eval()
    with gascompile.compile(model, "2MiB", machine="cpu-nvme", cache_dir=cache) as compiled:
        for sizes in order:
            x, y = (torch.randn(n, 16) for n in sizes)
            check(compiled, model, {"x": x, "y": y})


def test_ranges_for_which_two_sizes_decide_are_refused(cache: Path) -> None:
    x, y = torch.randn(5, 16), torch.randn(6, 16)
    sizes = {name: {0: torch.export.Dim(name, min=2, max=9)} for name in "xy"}
    compiled = gascompile.compile(
        Square().eval(), "2MiB", machine="cpu-nvme", cache_dir=cache, dynamic_shapes=sizes
    )
    with pytest.raises(CaptureError, match=r"x\.shape\[0\], y\.shape\[0\].*leave out"):
        compiled(x=x, y=y)
