"""What changes would be worth, on plans whose times can be added in the head."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.passes.explain.whatif import Variant, whatif
from gascompile.passes.model.problem import Placement, problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.search import best_staging
from tests.cost_models.hand_plans import training
from tests.passes.planning import (
    PAGE,
    UNIT,
    budget_at,
    cpu_machine,
    gpu_machine,
    machines,
    shares,
    workload,
    workloads,
)

ROOM = reserve_bytes(UNIT)
"""What one weight takes: 100 pages."""


def _one(found: tuple[Variant, ...]) -> Variant:
    assert len(found) == 1
    return found[0]


def test_memory_bandwidth_a_drive_and_half_the_budget() -> None:
    # Two of four weights stay; the other two take turns in the third place, 1 s each.
    task, machine = workload("abcd", seconds=0.001), cpu_machine()
    plan = make_plan(task, machine, Budget(cpu=3 * ROOM), fingerprint={})
    assert plan.certificate.predicted_s == pytest.approx(2.0, abs=0.005)
    found = whatif(plan, step_bytes=ROOM, step_bytes_per_s=3 * UNIT)
    assert found.base_s == plan.certificate.predicted_s
    assert found.binding == "nvme->cpu"
    more = {variant.subject: variant for variant in found.of("budget")}
    assert more["cpu"].predicted_s == pytest.approx(0.004)
    assert more["cpu"].change_s == pytest.approx(0.004 - found.base_s)
    assert more["nvme"].change_s == 0
    # The relaxation keeps two thirds of each: 4 * 2/3 and the third of one beside them are 3 rooms.
    assert more["cpu"].bound_change_s == pytest.approx(-4 / 3, abs=0.005)
    assert more["nvme"].bound_change_s == 0
    # One room more lets each of the four keep another third.
    assert more["cpu"].price_s == pytest.approx(-4 / 3, abs=0.01)
    assert more["nvme"].price_s is None
    faster = _one(found.of("bandwidth"))
    assert (faster.subject, faster.amount) == ("nvme->cpu", 3 * UNIT)
    assert faster.predicted_s == pytest.approx(0.5, abs=0.005)
    # A slope, so it promises too much of four times the bandwidth: three times what is moved now.
    assert faster.price_s is not None
    assert faster.price_s == pytest.approx(-3 * 4 / 3, rel=0.02)
    drive = _one(found.of("drive"))
    assert drive.predicted_s == pytest.approx(1.0, abs=0.005)
    assert drive.speedup(found.base_s) == pytest.approx(1.0, abs=0.01)
    # The next budget that helps is the one in which all four stay.
    helps = _one(found.of("next"))
    assert helps.predicted_s == pytest.approx(0.004)
    assert ROOM <= helps.amount <= 1.2 * ROOM
    half = _one(found.of("half"))
    assert half.predicted_s == pytest.approx(4.0, abs=0.01)
    assert half.amount == -(3 * ROOM - 3 * ROOM // 2)


def test_a_budget_that_nothing_keeps_names_the_smallest_one() -> None:
    plan = make_plan(
        workload("abcd", seconds=0.001), cpu_machine(), Budget(cpu=ROOM), fingerprint={}
    )
    half = _one(whatif(plan).of("half"))
    assert half.predicted_s is None
    assert half.change_s is None
    assert half.required_bytes == ROOM


def test_nothing_helps_where_ops_set_the_time() -> None:
    plan = make_plan(workload("abcd"), cpu_machine(1e12), Budget(cpu=2 * ROOM), fingerprint={})
    found = whatif(plan)
    assert found.binding == "compute"
    assert found.of("next") == ()
    helping = [v for v in found.variants if v.change_s is not None and v.change_s < -1e-6]
    assert helping == []


def test_a_pipe_of_the_drive_is_doubled_with_it_and_a_shared_one_is_not() -> None:
    machine = gpu_machine(cpu_bytes=PAGE, pipe=float(UNIT))
    task = workload("abcd", seconds=0.001)
    shared = make_plan(task, machine, Budget(gpu=3 * ROOM), fingerprint={})
    assert _one(whatif(shared).of("drive")).predicted_s == pytest.approx(2.0, abs=0.01)
    links = tuple(
        replace(link, shared=("uplink",) if link.source_tier == "nvme" else ())
        for link in machine.links
    )
    own = make_plan(task, replace(machine, links=links), Budget(gpu=3 * ROOM), fingerprint={})
    found = whatif(own)
    assert _one(found.of("drive")).predicted_s == pytest.approx(1.0, abs=0.01)
    subjects = {variant.subject for variant in found.of("bandwidth")}
    assert subjects == {"cpu->gpu", "nvme->gpu", "uplink"}


def test_a_forced_plan_is_compared_with_the_best_one() -> None:
    task, machine = workload("abcabc", seconds=0.001), cpu_machine()
    plan = make_plan(task, machine, Budget(cpu=2 * ROOM), fingerprint={}, strategy="all_streamed")
    found = whatif(plan)
    assert found.plan_s == plan.certificate.predicted_s
    assert found.base_s < found.plan_s
    assert "slower than one made anew" in found.notes[0]


def test_training_is_planned_with_everything_movable() -> None:
    plan = training()
    tight = plan.with_accounts(budget_bytes={**plan.budget_bytes, "gpu": 7 * 10**6})
    found = whatif(tight, step_bytes=10**6, time_limit_s=1.0)
    # Kept in 9 MB it takes its ops alone, 12 s.
    assert found.base_s >= 12.0
    assert {v.bound_change_s for v in found.variants} == {None}
    half = _one(found.of("half"))
    assert half.predicted_s is None
    assert half.required_bytes is not None
    assert half.required_bytes > 7 * 10**6 // 2


@settings(max_examples=6, deadline=None)
@given(task=workloads(5, 6), on=machines(), share=shares())
def test_more_is_never_slower_and_less_never_faster(
    task: Workload, on: Machine, share: float
) -> None:
    plan = make_plan(
        task, on, Budget.of(budget_at(share, task, on), on), fingerprint={}, time_limit_s=1.0
    )
    found = whatif(plan, step_bytes=20 * PAGE, time_limit_s=1.0)
    tolerance_s = 1e-9 * found.base_s
    for variant in found.variants:
        if variant.predicted_s is not None and variant.change in ("budget", "bandwidth", "drive"):
            assert variant.bound_change_s is None or variant.bound_change_s <= tolerance_s
            if variant.price_s is not None and variant.bound_change_s is not None:
                assert variant.price_s <= variant.bound_change_s + 1e-6 * found.base_s
        if variant.change_s is None:
            assert variant.change == "half"
        elif variant.change == "half":
            assert variant.change_s >= -tolerance_s
        elif variant.change in ("budget", "next"):
            assert variant.change_s <= tolerance_s


@settings(max_examples=4)
@given(workloads(max_weights=4, max_ops=5), shares())
def test_no_change_saves_more_than_is_proven(task: Workload, share: float) -> None:
    """Neither the plan made for it, nor any resident set in any size of the staging region."""
    machine, step = cpu_machine(60e6, 1e-4), 9 * PAGE
    limit = budget_at(share, task, machine)
    found = whatif(make_plan(task, machine, Budget(cpu=limit), fingerprint={}), step_bytes=step)
    for variant in found.variants:
        if variant.change_s is not None:
            assert variant.proven_change_s is not None
            assert variant.change_s >= variant.proven_change_s - 1e-9 * found.base_s
    more = next(v for v in found.of("budget") if v.subject == "cpu")
    assert more.proven_change_s is not None
    asked = problem(task, machine, Budget(cpu=limit + step))
    for count in range(len(asked.weights) + 1):
        for resident in combinations(range(len(asked.weights)), count):
            link_of = tuple(None if i in resident else 0 for i in range(len(asked.weights)))
            placement = Placement(strategy="oracle", link_of=link_of)
            schedule = best_staging(asked, placement, asked.arena_limit_bytes)
            if schedule is not None:
                least_s = found.base_s + more.proven_change_s
                assert schedule.seconds >= least_s * (1 - 1e-9)
