"""Views that are planned with other ops: what is joined, plans taken apart again, and bounds against the optimum."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.errors import InfeasiblePlanError, UnsupportedOpError
from gascompile.core.steps import Compute, Recompute, Release, Reload
from gascompile.core.workload import PERSISTENT, OpSpec, TensorKind, Workload
from gascompile.passes.intervals import plan_intervals as planner
from gascompile.passes.intervals.guides import Guides
from gascompile.passes.intervals.join_views import join_views
from gascompile.passes.intervals.search import FEW_TENSORS, Search
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_problem import interval_problem
from tests.passes.move_oracle import move_optimum
from tests.passes.planning import drive, task
from tests.passes.random_workloads import Case, cases, op
from tests.passes.step_interpreter import simulate
from tests.scale import SCALE

VIEW_S = 2.0**-17
"""Below what may be a view; sums of it with whole seconds are exact."""


def view(name: str, reads: str) -> OpSpec:
    return op(name, VIEW_S, reads)


def with_views(case: Case, seed: int) -> Case:
    """Return the case with views before and behind its ops, of what these hold and of what they do not."""
    chance = random.Random(seed)
    center = case.machine.compute_tier
    lasting = [t.name for t in case.workload.tensors if t.kind in PERSISTENT]
    ops: list[OpSpec] = []

    def look(names: list[str]) -> None:
        if names and chance.random() < 0.5:
            seen = tuple(chance.sample(names, chance.randint(1, min(2, len(names)))))
            name = f"view {len(ops)}"
            ops.append(OpSpec(name=name, reads=seen, time_s={center: VIEW_S}))

    for at in case.workload.ops:
        look([*at.reads])
        ops.append(at)
        look([*at.reads, *at.writes])
        if chance.random() < 0.2:
            look(lasting)
    return replace(case, workload=replace(case.workload, ops=tuple(ops)))


def test_views_go_to_the_op_that_holds_what_they_look_at() -> None:
    workload = task(
        "w:weight:4 a:activation:4 c:output:1",
        view("of w", "w"),
        op("make a", 2, "w", "a"),
        view("of a", "a"),
        view("of w again", "w"),
        op("pause", 3),
        view("alone", "w"),
        op("use a", 1, "a", "c"),
    )
    joined = join_views(workload, "cpu")
    assert joined.members == ((0, 1, 2, 3), (4,), (5,), (6,))
    assert joined.main == (1, 4, 5, 6)
    assert joined.views_s == (3 * VIEW_S, 0.0, 0.0, 0.0)
    assert [spec.name for spec in joined.workload.ops] == ["make a", "pause", "alone", "use a"]
    assert joined.workload.ops[0].time_s == {"cpu": 2 + 3 * VIEW_S}
    steps = (
        Reload(op=0, tensor="w", link="nvme->cpu", size_bytes=4),
        Compute(op=0),
        Recompute(op=1, source=0),
        Compute(op=1),
        Compute(op=2),
        Compute(op=3),
        Release(op=4, tensor="w"),
    )
    assert joined.apart(steps) == (
        Reload(op=0, tensor="w", link="nvme->cpu", size_bytes=4),
        *(Compute(op=i) for i in range(4)),
        Recompute(op=4, source=1),
        *(Compute(op=i) for i in range(4, 7)),
        Release(op=7, tensor="w"),
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"writes": ("a",)},
        {"workspace_bytes": 1},
        {"time_s": {"cpu": 1e-3}},
        {"time_s": {"gpu": VIEW_S}},
        {"gathers": {"w": 1}},
        {"splits": {"w": 2}},
        {"cuts": {"w": 2}},
        {"patches": {"w": 1}},
    ],
)
def test_what_takes_or_makes_anything_is_no_view(changed: dict[str, Any]) -> None:
    workload = task("w:weight:4 a:activation:4", op("use w", 1, "w"), view("of w", "w"))
    other = replace(workload.ops[1], **changed)
    assert len(join_views(workload, "cpu").members) == 1
    assert len(join_views(replace(workload, ops=(workload.ops[0], other)), "cpu").members) == 2


def test_an_op_without_a_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has a view beside it."""
    monkeypatch.setattr(planner, "_is_large", lambda workload: True)
    workload = task("w:weight:4", op("use w", 1, "w"), view("of w", "w"))
    apart = replace(workload.ops[0], time_s={"gpu": 1.0})
    workload = replace(workload, ops=(apart, workload.ops[1]))
    assert join_views(workload, "cpu").members == ((0,), (1,))
    with pytest.raises(UnsupportedOpError, match="op 'use w' has no time on 'cpu'"):
        planner.plan_intervals(workload, drive(), {"cpu": 8}, effort=Effort(time_limit_s=1))


def test_what_only_reads_what_the_caller_gives_takes_views_of_that_alone() -> None:
    """An op that holds nothing of the plan's is no view for all that."""
    workload = task(
        "x:input:4 w:weight:4",
        op("look at x", 5, "x"),
        op("use w", 1, "w"),
        view("of x", "x"),
    )
    assert join_views(workload, "cpu").members == ((0,), (1, 2))


@settings(max_examples=40 * SCALE, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_each_op_stands_once_in_its_place(case: Case, seed: int) -> None:
    workload, site = with_views(case, seed).workload, case.machine.compute_tier
    joined = join_views(workload, site)
    assert [*chain(*joined.members)] == list(range(len(workload.ops)))
    given_names = {t.name for t in workload.tensors if t.kind is TensorKind.INPUT}
    for members, main, spec in zip(joined.members, joined.main, joined.workload.ops, strict=True):
        whole = workload.ops[main]
        assert main in members
        assert (spec.name, spec.reads, spec.writes) == (whole.name, whole.reads, whole.writes)
        assert spec.time_s[site] == sum(workload.ops[i].time_s[site] for i in members)
        for i in members:
            seen = {*workload.ops[i].reads} - given_names
            assert seen <= {*whole.reads, *whole.writes}
            assert i == main or not workload.ops[i].writes


@settings(max_examples=12 * SCALE, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_plans_of_joined_ops_run_in_the_same_memory(case: Case, seed: int) -> None:
    """Small problems, whose views are joined as those of large ones: a budget is refused only with them apart, too."""
    case = with_views(case, seed)
    joined = attempt(case, joins=True)
    if joined is None:
        assert attempt(case, joins=False) is None
        return
    best = move_optimum(case.workload, case.machine, case.limits_bytes, max_labels=3000)
    assert best is None or joined >= best.seconds * (1 - 1e-9) or len(case.machine.tiers) > 2


def attempt(case: Case, *, joins: bool) -> float | None:
    """Return the seconds of a plan that was executed, or ``None`` where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_is_large", lambda workload: joins)
        try:
            plan = planner.plan_intervals(
                case.workload, case.machine, case.limits_bytes, effort=Effort(time_limit_s=5)
            )
        except InfeasiblePlanError:
            return None
    done = simulate(
        case.workload, case.machine, plan.steps, plan.homes, limits_bytes=case.limits_bytes
    )
    assert done.seconds == pytest.approx(plan.seconds, abs=1e-9)
    assert joins or plan.bound_s <= plan.seconds
    assert len(plan.sites) == len(case.workload.ops)
    return plan.seconds


@settings(max_examples=25 * SCALE, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_the_bound_of_joined_ops_holds_for_plans_of_all(case: Case, seed: int) -> None:
    case = with_views(case, seed)
    best = move_optimum(case.workload, case.machine, case.limits_bytes, max_labels=3000)
    if best is None or best.seconds == math.inf:
        return
    joined = join_views(case.workload, case.machine.compute_tier)
    problem = interval_problem(joined.workload, case.machine, case.limits_bytes)
    search = Search(replace(problem, views_s=joined.views_s), Effort(time_limit_s=10))
    guides = Guides(search, {})
    try:
        assert guides.proof().bound_s <= best.seconds * (1 + 1e-9)
    finally:
        guides.close()


def many_layers(count: int) -> Workload:
    """Return a step of so many layers whose weights and results are looked at before they are used."""
    tensors = [f"w{i}:weight:4 a{i}:activation:4" for i in range(count)]
    ops: list[OpSpec] = []
    for i in range(count):
        ops += [view(f"of w{i}", f"w{i}"), op(f"forward {i}", 2, f"w{i}", f"a{i}")]
    for i in reversed(range(count)):
        ops += [view(f"of a{i}", f"a{i}"), op(f"backward {i}", 3, f"w{i} a{i}", f"w{i}")]
    return task(" ".join(tensors), *ops)


def test_a_large_step_is_planned_with_its_views_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in its memory, as fast as without, and takes half of the runs to plan."""
    workload, machine, limits = many_layers(FEW_TENSORS), drive(8.0, 8.0), {"cpu": 160}
    places = tuple(replace(place, size_bytes=1 << 20) for place in machine.places)
    machine = replace(machine, places=places)
    runs: list[int] = []

    def planned(*, joins: bool) -> float:
        monkeypatch.setattr(planner, "_is_large", lambda workload: joins)
        plan = planner.plan_intervals(workload, machine, limits, effort=Effort(time_limit_s=5))
        done = simulate(workload, machine, plan.steps, plan.homes, limits_bytes=limits)
        assert done.seconds == pytest.approx(plan.seconds, abs=1e-9)
        assert plan.bound_s <= plan.seconds
        assert [s.op for s in plan.steps if isinstance(s, Compute)] == [*range(len(workload.ops))]
        return plan.seconds

    begin = Search.__init__

    def counted(search: Search, *args: Any, **kwargs: Any) -> None:
        begin(search, *args, **kwargs)
        runs.append(search.base.num_runs)

    assert planner._is_large(workload)
    monkeypatch.setattr(Search, "__init__", counted)
    assert planned(joins=True) <= planned(joins=False) * 1.02
    assert runs == [2 * FEW_TENSORS + 1, 4 * FEW_TENSORS + 1]
