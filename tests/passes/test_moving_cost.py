"""Plans where moving bytes takes processors' time from ops: fewest bytes where time is the same, and true bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Interference
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Recompute
from gascompile.core.workload import Workload
from gascompile.cost_models.simulate.replay import link_bytes
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.intervals import IntervalPlan
from gascompile.passes.plan.make_plan import make_plan
from tests.passes.planning import drive, task
from tests.passes.random_workloads import Case, cases, op
from tests.passes.step_interpreter import simulate
from tests.scale import SCALE

QUICK = drive(100.0, 100.0)
UPDATES = task(
    "v:state:4 w:state:4 x:weight:4",
    op("change v", 8, "v", "v"),
    op("change w", 8, "w", "w"),
    op("use x", 8, "x", ""),
)


def moved_bytes(workload: Workload, found: IntervalPlan) -> int:
    return sum(link_bytes(found.steps, workload.ops, QUICK).values())


def contended_s(case: Case, found: IntervalPlan, op_s_per_byte: float) -> float:
    """Return the seconds of a plan, and no less than ops, reruns and moves take from the processors."""
    ops_s = sum(spec.time_s[case.machine.compute_tier] for spec in case.workload.ops)
    again = [case.workload.ops[s.source] for s in found.steps if isinstance(s, Recompute)]
    ops_s += sum(spec.time_s[case.machine.compute_tier] for spec in again)
    moved = sum(link_bytes(found.steps, case.workload.ops, case.machine).values())
    return max(found.seconds, ops_s + moved * op_s_per_byte)


def test_of_two_tensors_that_may_leave_in_time_the_smaller_one_does() -> None:
    """Belady would send away a, which is used last: 12 bytes out and back where 8 do."""
    workload = task(
        "a:activation:6 b:activation:4 c:activation:4",
        op("make a", 8, "", "a"),
        op("make b", 8, "", "b"),
        op("pause", 8, "", ""),
        op("make c", 8, "", "c"),
        op("use c", 8, "c", ""),
        op("pause again", 8, "", ""),
        op("use b", 8, "b", ""),
        op("use a", 8, "a", ""),
    )
    found = plan_intervals(
        workload,
        QUICK,
        {"cpu": 10},
        effort=Effort(time_limit_s=5, mip_gap=0.0),
        recompute=False,
        op_s_per_byte=0.5,
    )
    simulate(workload, QUICK, found.steps, found.homes, limits_bytes={"cpu": 10})
    assert moved_bytes(workload, found) == 8
    # The seconds are those of links, as ops do not feel the moves there; the bound feels them.
    assert found.seconds == 64.0
    assert found.bound_s == pytest.approx(68.0, rel=1e-3)


def adapted(num_layers: int) -> Workload:
    """Return a step over frozen layers: forward with what is saved, backward, and a small update in each."""
    sizes = [(f"w{i}", "weight", 10) for i in range(num_layers)]
    sizes += [(f"s{i}", "activation", 4) for i in range(num_layers)]
    sizes += [(f"t{i}", "state", 1) for i in range(num_layers)]
    forward = [op(f"forward {i}", 8, f"w{i} t{i}", f"s{i}") for i in range(num_layers)]
    backward = [
        op(f"backward {i}", 8, f"w{i} s{i} t{i}", f"t{i}") for i in reversed(range(num_layers))
    ]
    words = " ".join(f"{name}:{kind}:{size}" for name, kind, size in sizes)
    return task(words, *forward, *backward)


def test_where_all_moves_are_hidden_weights_come_anew_and_nothing_saved_goes_out() -> None:
    """Whatever leaves, ops take all of the time; what is saved would be moved twice, and weights once."""
    num_layers, budget = 30, 250
    workload, machine = adapted(num_layers), drive(100.0, 100.0)
    places = tuple(replace(place, size_bytes=1000) for place in machine.places)
    machine = replace(machine, places=places)
    limits = {"cpu": budget}
    found = plan_intervals(
        workload, machine, limits, effort=Effort(time_limit_s=5), recompute=False
    )
    simulate(workload, machine, found.steps, found.homes, limits_bytes=limits)
    ops_s = 16.0 * num_layers
    assert found.seconds <= ops_s * 1.001
    assert not any(isinstance(step, Offload) for step in found.steps)
    # What is not there as the forward pass begins, and as the backward pass does beside all that is saved, has to come.
    held = budget - num_layers
    least = (10 * num_layers - held) + (10 * num_layers - (held - 4 * num_layers))
    moved = sum(link_bytes(found.steps, workload.ops, machine).values())
    assert least <= moved <= 1.2 * least


def test_fewer_moves_are_worth_no_time_where_engines_of_a_gpu_move() -> None:
    workload, machine = adapted(60), drive(1.0, 1.0)
    places = tuple(replace(place, size_bytes=2000) for place in machine.places)
    found = [
        plan_intervals(
            workload,
            replace(machine, places=places, backend=backend),
            {"cpu": 150},
            effort=Effort(time_limit_s=5),
        )
        for backend in ("cpu", "cuda")
    ]
    shared, own = found
    assert own.seconds < shared.seconds < own.seconds * 1.002
    assert moved_bytes(workload, shared) < moved_bytes(workload, own)


def certified(workload: Workload, budget: int, op_s_per_byte: float) -> Plan:
    machine = replace(QUICK, interference=Interference(op_s_per_byte=op_s_per_byte))
    return make_plan(workload, machine, Budget(cpu=budget), fingerprint={}, move_all=True)


def test_the_limit_counts_what_changes_twice() -> None:
    """Of 12 bytes that are used 4 do not fit; those that change all do, so nothing has to go out."""
    found = certified(UPDATES, 8, 0.5).certificate
    # One tensor stays; of the others each makes room for the other: 8 bytes come in, 4 go out.
    assert found.limit_s == 26.0
    assert found.predicted_s == pytest.approx(30.0)
    # Here 8 bytes have to come in, and 4 of those that change have to go out.
    found = certified(UPDATES, 4, 0.5).certificate
    assert found.limit_s == 30.0
    # Each tensor is alone in memory: 12 bytes come in, 8 go out.
    assert found.predicted_s == pytest.approx(34.0)


@settings(max_examples=12 * SCALE, deadline=None)
@given(cases(), st.sampled_from([0.1, 1.0, 8.0]))
def test_no_plan_beats_the_bound(case: Case, op_s_per_byte: float) -> None:
    try:
        plain, felt = (
            plan_intervals(
                case.workload,
                case.machine,
                case.limits_bytes,
                effort=Effort(time_limit_s=1),
                op_s_per_byte=cost,
            )
            for cost in (0.0, op_s_per_byte)
        )
    except InfeasiblePlanError:
        return
    simulate(case.workload, case.machine, felt.steps, felt.homes, limits_bytes=case.limits_bytes)
    for found in (plain, felt):
        assert felt.bound_s <= contended_s(case, found, op_s_per_byte) * (1 + 1e-9)
