"""Plans of the whole planner, executed by the step interpreter and held against the exhaustive optimum."""

from __future__ import annotations

import math

import pytest

from gascompile.api.plan import plan
from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES
from tests.passes.move_oracle import move_optimum
from tests.passes.random_workloads import PERSISTENT, Case, draw_case
from tests.passes.step_interpreter import Simulated, simulate
from tests.scale import SCALE

TIME_LIMIT_S = 2.0
"""What is compared holds for any plan, however long its search was."""
UNIT = 64 * PAGE_BYTES
"""Large enough that whole pages and their alignment are small change."""


def planned(case: Case) -> Plan | None:
    """Return the plan of a case, ``None`` where the budget is refused."""
    limits = case.limits_bytes
    budget = Budget(gpu=limits.get("gpu"), cpu=limits["cpu"], nvme=limits["nvme"])
    try:
        return plan(case.workload, budget, case.machine, time_limit_s=TIME_LIMIT_S)
    except InfeasiblePlanError:
        return None


def executed(found: Plan) -> Simulated:
    """Return what the interpreter says of a plan within its own budget."""
    center = found.machine.compute_tier
    persistent = {n: t for n, t in found.tensors.items() if t.kind in PERSISTENT}
    return simulate(
        found.workload,
        found.machine,
        found.steps,
        {name: at.home for name, at in persistent.items()},
        arena_bytes=found.arena_bytes.get(center, 0),
        residents={n: at.address for n, at in persistent.items() if at.address is not None},
        sites=[at.site for at in found.ops],
        limits_bytes=found.budget_bytes,
    )


@pytest.mark.parametrize("block", range(2 * SCALE))
def test_plans_compute_the_right_values_in_the_time_they_claim(block: int) -> None:
    num_plans = num_compared = 0
    for seed in range(20 * block, 20 * block + 20):
        case = draw_case(seed, max_tensors=6, max_ops=6).scaled(UNIT)
        found = planned(case)
        if found is None:
            continue
        num_plans += 1
        shown = executed(found)
        assert shown.seconds == pytest.approx(found.certificate.predicted_s, rel=1e-6), seed
        for link, moved in shown.link_bytes.items():
            assert found.link_bytes.get(link, 0) == moved, (seed, link)
        center = case.machine.compute_tier
        assert shown.peak_bytes[center] <= found.peak_bytes[center] <= case.limits_bytes[center]
        best = move_optimum(case.workload, case.machine, case.limits_bytes, max_labels=2_000)
        if best is not None:
            num_compared += 1
            assert best.seconds < math.inf, f"{seed}: planned what cannot be"
            assert shown.seconds >= best.seconds * (1 - 1e-9), seed
    assert num_plans >= 8
    assert num_compared >= 6
