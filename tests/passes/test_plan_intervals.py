"""Plans over intervals: by hand, against an interpreter, an exhaustive optimum and every heuristic."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.training_traces import reference_machine, trace
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import OpSpec, Workload
from gascompile.cost_models.simulate.events import steady_seconds
from gascompile.cost_models.simulate.replay import replay
from gascompile.passes.bounds import linear_program
from gascompile.passes.bounds.interval_program import interval_program
from gascompile.passes.intervals.decisions import decisions
from gascompile.passes.intervals.events import event_program, interval_steps
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.intervals.recompute import recompute_ops
from gascompile.passes.intervals.schedule import schedule
from gascompile.passes.intervals.search import Search
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.intervals.strategies import STRATEGIES
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_layout import layout
from gascompile.passes.model.interval_problem import interval_problem
from gascompile.passes.model.intervals import IntervalPlan
from tests.passes.move_oracle import move_optimum
from tests.passes.planning import drive, task
from tests.passes.random_workloads import Case, cases, op
from tests.passes.step_interpreter import simulate
from tests.scale import SCALE


def planned(workload: Workload, budget: int, machine: Machine | None = None) -> IntervalPlan:
    """Return the plan within ``budget``, after executing it step by step within that budget."""
    machine = machine or drive()
    limits = {machine.compute_tier: budget}
    plan = plan_intervals(workload, machine, limits, effort=Effort(time_limit_s=5, mip_gap=0.0))
    done = simulate(workload, machine, plan.steps, plan.homes, limits_bytes=limits)
    assert done.seconds == pytest.approx(plan.seconds, abs=1e-9)
    return plan


UP_AND_DOWN = task(
    "a:activation:4 b:activation:4 c:output:1",
    op("make a", 4, "", "a"),
    op("make b", 4, "", "b"),
    op("use b", 4, "b", ""),
    op("use a", 1, "a", "c"),
)


def test_everything_stays_where_it_fits() -> None:
    plan = planned(UP_AND_DOWN, 8)
    assert plan.steps == tuple(Compute(op=i) for i in range(4))
    assert (plan.seconds, plan.bound_s, plan.timed_out) == (13.0, 13.0, False)
    assert (plan.sites, plan.solver) == (("cpu",) * 4, "none")


def test_an_activation_leaves_and_comes_back() -> None:
    """Four bytes out while b could not stand beside a: that much is waited for, the way back is not."""
    sums = task(
        "a:activation:4 b:activation:4 c:output:1",
        op("make a", 8, "", "a"),
        op("make b", 4, "", "b"),
        op("pause", 4, "", ""),
        op("use a", 1, "a", "c"),
        repeats=False,
    )
    plan = planned(sums, 7)
    assert plan.steps == (
        Compute(op=0),
        Offload(op=1, tensor="a", link="cpu->nvme", size_bytes=4),
        Wait(op=1, tensor="a"),
        Release(op=1, tensor="a"),
        Compute(op=1),
        Reload(op=2, tensor="a", link="nvme->cpu", size_bytes=4),
        Compute(op=2),
        Wait(op=3, tensor="a"),
        Compute(op=3),
    )
    assert plan.seconds == 21.0


def test_recomputing_is_cheaper_than_a_slow_drive() -> None:
    cheap = task(
        "a:activation:4 b:activation:4 c:output:1",
        op("make a", 1, "", "a"),
        op("make b", 1, "", "b"),
        op("use b", 1, "b", ""),
        op("use a", 1, "a", "c"),
    )
    plan = planned(cheap, 7)
    assert plan.steps == (
        Compute(op=0),
        Release(op=1, tensor="a"),
        Compute(op=1),
        Compute(op=2),
        Recompute(op=3, source=0),
        Compute(op=3),
    )
    assert plan.seconds == 5.0


def test_a_chain_is_recomputed_without_links() -> None:
    """Neither a nor b can stand beside c: b is made again from a, and a from nothing."""
    chain = task(
        "a:activation:4 b:activation:4 c:activation:6",
        op("make a", 1, "", "a"),
        op("make b", 1, "a", "b"),
        op("make c", 1, "", "c"),
        op("use c", 1, "c", ""),
        op("use b", 1, "b", ""),
    )
    plan = planned(chain, 8, drive(0, 0))
    again = [step.source for step in plan.steps if isinstance(step, Recompute)]
    assert again == [0, 1]
    assert plan.seconds == 7.0


def test_all_results_of_an_op_are_made_again_by_one_rerun() -> None:
    """Either of a and b alone would leave too little room for c."""
    pair = task(
        "a:activation:4 b:activation:4 c:activation:8",
        op("make both", 1, "", "a b"),
        op("make c", 1, "", "c"),
        op("use c", 1, "c", ""),
        op("use b", 1, "b", ""),
        op("use a", 1, "a", ""),
    )
    plan = planned(pair, 8, drive(0, 0))
    again = [step.source for step in plan.steps if isinstance(step, Recompute)]
    assert (again, plan.seconds, plan.bound_s) == ([0], 6.0, 6.0)


def relaxed_s(workload: Workload, budget: int) -> float:
    """Return the bound of the program on a machine without links."""
    plan = layout(interval_problem(workload, drive(0, 0), {"cpu": budget}))
    return interval_program(plan, recompute_ops(plan), num_slots=20, time_limit_s=10).bound_s


def test_the_bound_counts_a_rerun_once_for_all_results() -> None:
    workload = task(
        "a:activation:4 b:activation:4 c:activation:8",
        op("make both", 3, "", "a b"),
        op("make c", 1, "", "c"),
        op("use both", 1, "a b c", ""),
        op("use c", 1, "c", ""),
    )
    assert relaxed_s(workload, 16) == pytest.approx(6.0, rel=1e-3)
    apart = replace_op(workload, 2, op("use c first", 1, "c", ""), op("use both", 1, "a b", ""))
    assert relaxed_s(apart, 8) == pytest.approx(9.0, rel=1e-3)


def test_the_bound_counts_inputs_that_are_dead() -> None:
    """b is made from a, which nothing else reads: both ops run again, and no plan is faster."""
    workload = task(
        "a:activation:4 b:activation:4 c:activation:8",
        op("make a", 2, "", "a"),
        op("make b", 1, "a", "b"),
        op("make c", 1, "", "c"),
        op("use c", 1, "c", ""),
        op("use b", 1, "b", ""),
    )
    assert relaxed_s(workload, 8) == pytest.approx(9.0, rel=1e-3)
    assert planned(workload, 8, drive(0, 0)).seconds == 9.0


def replace_op(workload: Workload, at: int, *ops: OpSpec) -> Workload:
    """Return the workload with other ops in place of the one at ``at`` and all behind it."""
    return replace(workload, ops=(*workload.ops[:at], *ops))


def test_what_is_written_cannot_be_made_again() -> None:
    """The op that makes b reads s, which changes before b is needed again."""
    changed = task(
        "s:state:1 b:activation:4 c:activation:4",
        op("make b", 1, "s", "b"),
        op("change s", 1, "s", "s"),
        op("make c", 1, "", "c"),
        op("use b", 1, "b", ""),
    )
    with pytest.raises(InfeasiblePlanError) as raised:
        planned(changed, 8, drive(0, 0))
    assert raised.value.required_bytes == 9
    assert raised.value.op == "make c"


CLEAN = task("v:weight:4 w:weight:4", op("use v", 4, "v", ""), op("use w", 4, "w", ""))
DIRTY = task("v:weight:4 w:weight:4", op("change v", 4, "v", "v"), op("change w", 4, "w", "w"))


def test_what_lasts_is_not_written_out_to_stay() -> None:
    # Before it is read again "k" cannot leave: written out, it would lie outside at the end, but not at the beginning.
    workload = task(
        "k:state:8 x:activation:1 y:output:1",
        op("write", 1, "k", "k x"),
        op("meanwhile", 1, "x", "x"),
        op("read", 1, "k x", "y"),
    )
    effort = Effort(time_limit_s=1.0, mip_gap=0.0)
    search = Search(interval_problem(workload, drive(), {"cpu": 64}), effort)
    selection = Selection(search.base)
    inner = [j for j, i in enumerate(search.base.intervals) if (i.start, i.end) == (0, 2)]
    assert [search.task.names[search.base.intervals[j].tensor] for j in inner] == ["k"]
    assert selection.add(inner[0])
    assert search.consider("by hand", selection, rounds=1) is None
    scheduled = search.consider("by hand", selection)
    assert scheduled is not None
    assert not [step for step in interval_steps(scheduled.schedule) if isinstance(step, Offload)]


def test_clean_weights_leave_for_free() -> None:
    plan = planned(CLEAN, 4)
    assert not any(isinstance(step, Offload) for step in plan.steps)
    assert plan.homes == {"v": "nvme", "w": "nvme"}
    assert plan.seconds == 16.0
    assert planned(CLEAN, 8).homes == {"v": "cpu", "w": "cpu"}


def test_dirty_weights_are_written_out() -> None:
    plan = planned(DIRTY, 4)
    assert sum(isinstance(step, Offload) for step in plan.steps) == 2
    assert plan.homes == {"v": "nvme", "w": "nvme"}
    assert plan.seconds == 24.0


def test_dirty_weights_stay_without_a_way_out() -> None:
    with pytest.raises(InfeasiblePlanError) as raised:
        planned(DIRTY, 7, drive(1, 0))
    assert (raised.value.required_bytes, raised.value.limit_bytes) == (8, 7)
    assert planned(DIRTY, 8, drive(1, 0)).seconds == 8.0


def test_a_load_crosses_the_end_of_the_iteration() -> None:
    """w comes back during the long op, and is used first of all in the next iteration."""
    around = task(
        "w:weight:4 a:activation:4",
        op("use w", 1, "w", ""),
        op("fill", 1, "", "a"),
        op("last use", 1, "a", ""),
        op("long", 8, "", ""),
    )
    plan = planned(around, 7)
    assert isinstance(plan.steps[0], Wait)
    assert plan.steps[-2] == Reload(op=3, tensor="w", link="nvme->cpu", size_bytes=4)
    assert plan.seconds == 11.0


def test_reserved_bytes_are_left_free() -> None:
    with pytest.raises(InfeasiblePlanError) as raised:
        plan_intervals(CLEAN, drive(), {"cpu": 6}, reserved_bytes=3, effort=Effort(time_limit_s=5))
    assert (raised.value.required_bytes, raised.value.limit_bytes) == (7, 6)
    assert (
        plan_intervals(
            CLEAN, drive(), {"cpu": 7}, reserved_bytes=3, effort=Effort(time_limit_s=5)
        ).seconds
        == 16
    )


def test_slow_tiers_fill_up() -> None:
    small = {"cpu": 4, "nvme": 7}
    with pytest.raises(InfeasiblePlanError):
        plan_intervals(CLEAN, drive(), small, effort=Effort(time_limit_s=5))


def test_without_a_solver_the_heuristics_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_program, "solver_name", lambda: "none")
    workload = trace("vit", 1280)
    plan = plan_intervals(
        workload, reference_machine(), {"gpu": int(1e10)}, effort=Effort(time_limit_s=1)
    )
    assert plan.bound_s == pytest.approx(sum(spec.time_s["gpu"] for spec in workload.ops))
    assert (plan.solver, plan.seconds > plan.bound_s) == ("none", True)


def test_nothing_to_do() -> None:
    plan = planned(task(""), 0)
    assert (plan.steps, plan.seconds) == ((), 0.0)


def attempt(case: Case) -> IntervalPlan | None:
    """Return the plan of a drawn case, executed and replayed; ``None`` where it is refused."""
    try:
        plan = plan_intervals(
            case.workload, case.machine, case.limits_bytes, effort=Effort(time_limit_s=2)
        )
    except InfeasiblePlanError:
        return None
    done = simulate(
        case.workload, case.machine, plan.steps, plan.homes, limits_bytes=case.limits_bytes
    )
    assert done.seconds == pytest.approx(plan.seconds, abs=1e-9)
    assert replayed(case, plan.steps) == pytest.approx(plan.seconds, abs=1e-9)
    assert plan.bound_s <= plan.seconds
    return plan


def replayed(case: Case, steps: tuple[Step, ...]) -> float:
    times = [spec.time_s[case.machine.compute_tier] for spec in case.workload.ops]
    repeats = case.workload.repeats
    return replay(steps, case.workload.ops, times, case.machine, repeats=repeats).seconds


@settings(max_examples=12 * SCALE, deadline=None)
@given(cases())
def test_small_plans_are_right_and_bounded_by_the_optimum(case: Case) -> None:
    plan = attempt(case)
    best = move_optimum(case.workload, case.machine, case.limits_bytes, max_labels=4000)
    if best is not None and plan is not None:
        assert plan.bound_s <= best.seconds * (1 + 1e-9)
        # The oracle lets a tensor use one slow tier alone.
        assert plan.seconds >= best.seconds * (1 - 1e-9) or len(case.machine.tiers) > 2
    if best is not None and plan is None:
        assert best.seconds == math.inf or not roomy(case)


def roomy(case: Case) -> bool:
    """Whether the slow tiers hold everything: only then is a refusal proven."""
    total = sum(tensor.size_bytes for tensor in case.workload.tensors)
    slow = {link.source_tier for link in case.machine.links_into(case.machine.compute_tier)}
    return all(case.limits_bytes[tier] >= total for tier in slow)


@settings(max_examples=12, deadline=None)
@given(cases(max_tensors=4, max_ops=4), st.integers(1, 6))
def test_more_memory_is_never_slower(case: Case, more: int) -> None:
    """Of problems small enough to be gone through in full."""
    plan = attempt(case)
    if plan is None or plan.bound_s < plan.seconds:
        return
    limit = case.limits_bytes[case.machine.compute_tier] + more
    richer = attempt(case.with_budget(limit))
    assert richer is not None
    assert richer.bound_s <= plan.seconds * (1 + 1e-9)
    assert richer.seconds <= plan.seconds * (1 + 1e-9) or richer.bound_s < richer.seconds


@settings(max_examples=5 * SCALE, deadline=None)
@given(cases(max_tensors=25, max_ops=30))
def test_larger_plans_are_right_and_no_slower_than_any_heuristic(case: Case) -> None:
    plan = attempt(case)
    if plan is None:
        return
    base = layout(interval_problem(case.workload, case.machine, case.limits_bytes))
    for strategy in STRATEGIES.values():
        selection = strategy(base)
        made = schedule(base, decisions(base, selection.routes)) if selection.fits else None
        seconds = steady_seconds(event_program(made)[0]) if made else math.inf
        assert plan.seconds <= seconds * (1 + 1e-4)


def test_a_training_iteration_close_to_its_bound() -> None:
    """A convolutional net at a tenth of its memory: above nine tenths of what is possible."""
    workload = trace("resnet152", 256)
    plan = plan_intervals(
        workload,
        reference_machine(),
        {"gpu": int(8e9)},
        effort=Effort(time_limit_s=15, mip_gap=0.02),
    )
    assert plan.bound_s >= sum(spec.time_s["gpu"] for spec in workload.ops) * (1 - 1e-6)
    assert plan.seconds <= plan.bound_s / 0.9


def test_the_clock_is_kept() -> None:
    workload = trace("vit", 1280)
    begun_s = time.process_time()  # of this process: neighbours are no concern of the planner
    plan = plan_intervals(
        workload,
        reference_machine(),
        {"gpu": int(10e9)},
        effort=Effort(time_limit_s=1.0, mip_gap=0.0),
    )
    assert plan.timed_out
    assert time.process_time() - begun_s < 10.0
