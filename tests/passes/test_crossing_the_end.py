"""Updates of random sizes and times, one after the other: what still leaves at the end keeps the budget of the next."""

from __future__ import annotations

import random

import pytest

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from tests.scale import SCALE
from tests.training.runs import MACHINE

PAGE = 4096


def updates(seed: int) -> Workload:
    """Return a dozen updates of a parameter and its two moments."""
    rng = random.Random(seed)
    tensors: list[TensorSpec] = []
    ops = []
    for i in range(12):
        names = (f"parameter{i}", f"mean{i}", f"square{i}")
        size_bytes = PAGE * rng.choice([4, 8, 16, 32])
        tensors += [
            TensorSpec(name=name, size_bytes=size_bytes, kind=TensorKind.STATE) for name in names
        ]
        seconds = 10 ** rng.uniform(-6, -3)
        ops.append(OpSpec(name=f"update{i}", time_s={"cpu": seconds}, reads=names, writes=names))
    return Workload(name="updates", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


@pytest.mark.parametrize("share", [0.25, 0.4, 0.7])
def test_plans_keep_their_budget_where_transfers_cross_the_end(share: float) -> None:
    planned = 0
    for seed in range(5 * SCALE):
        workload = updates(seed)
        all_bytes = sum(tensor.size_bytes for tensor in workload.tensors)
        budget = Budget(cpu=int(all_bytes * share))
        try:
            plan = make_plan(
                workload,
                MACHINE,
                budget,
                fingerprint={},
                time_limit_s=5.0,
                move_all=True,
                has_arena=False,
            )
        except InfeasiblePlanError:
            continue
        verify(plan)
        planned += 1
    assert planned > 2
