"""Plans whose ops are in another order than the program's: the same results, in fresh and saved models alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.bundles.check import check_program_of
from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.passes.graph.insert import insert
from tests.integration.site_models import ROWS, WIDTH, compiled, eager, machine

LAYER_S = 2 * ROWS * WIDTH * WIDTH / 1e9


class Pair(nn.Module):
    """Layers of two branches, of which the one that comes first in the program takes longer; one changes in place."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.long = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 * layers))
        self.short = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3 * layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(len(self.long) // 4):
            a = b = x * 2.0
            for linear in self.long[4 * layer : 4 * layer + 4]:
                a = torch.sin(linear(a).view(-1, WIDTH))
            for linear in self.short[3 * layer : 3 * layer + 3]:
                b = torch.sin(linear(b))
            x = (a + b).mul_(0.5)
        return x


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(4)
    return Pair().eval()


def paired(pair: Pair, cache: Path) -> gascompile.CompiledModel:
    # A value crosses in a fifth of the time of an op: three ops and two copies are over before four ops are.
    return compiled(pair, cache, 1 << 20, machine(rate=5 * 4 * ROWS * WIDTH / LAYER_S))


def test_ops_take_turns_as_they_end_and_give_the_same(
    pair: Pair, cache: Path, tmp_path: Path
) -> None:
    x = torch.randn(ROWS, WIDTH)
    with paired(pair, cache) as both:
        plan = both.plan
        captured = [node.name for node in both.program.op_nodes()]
        assert {op.site for op in plan.ops} == {"gpu", "cpu"}
        assert plan.certificate.predicted_s == pytest.approx(2 * 4 * LAYER_S, rel=0.01)
        assert torch.equal(both(x), eager(pair, x))
        both.save(tmp_path / "saved")
    order = [op.name for op in plan.ops]
    assert order != captured
    for site in ("gpu", "cpu"):
        here = [op.name for op in plan.ops if op.site == site]
        assert here == [name for name in captured if name in here]
    with gascompile.load(tmp_path / "saved", any_machine=True) as again:
        assert [op.name for op in again.plan.ops] == order
        assert torch.equal(again(x), eager(pair, x))


def reordered(plan: Plan, order: list[int]) -> Plan:
    ops = tuple(plan.workload.ops[i] for i in order)
    workload = dataclasses.replace(plan.workload, ops=ops)
    return dataclasses.replace(plan, workload=workload, ops=tuple(plan.ops[i] for i in order))


def test_no_other_order_is_taken(pair: Pair, cache: Path) -> None:
    with paired(pair, cache) as both:
        plan, program = both.plan, both.program
    numbers = list(range(len(plan.ops)))
    here = [i for i in numbers if plan.ops[i].site == "gpu"]
    there = [i for i in numbers if plan.ops[i].site == "cpu"]
    swapped = list(numbers)
    swapped[here[1]], swapped[here[2]] = here[2], here[1]
    for order in (swapped, [there[-1], *(i for i in numbers if i != there[-1])]):
        with pytest.raises(PlanMismatchError, match="plan this program again"):
            insert(program, reordered(plan, order))
    with pytest.raises(PlanMismatchError, match="of the program is"):
        check_program_of(reordered(plan, swapped), program)
