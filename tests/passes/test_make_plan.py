"""Plans whose sizes and times add up in the head, and what holds for every plan."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan, SolverStatus
from gascompile.core.sizes import MIB, reserve_bytes
from gascompile.core.steps import Compute, Prefetch, Release, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.passes.model.problem import Placement, problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.search import best_staging
from gascompile.passes.search.strategies import MANY_WEIGHTS, NAMES
from gascompile.passes.verify.walk import verify
from tests.passes.planning import (
    PAGE,
    UNIT,
    breaks,
    budget_at,
    cpu_machine,
    gpu_machine,
    least_budget,
    llama,
    machines,
    shares,
    workload,
    workloads,
)
from tests.scale import SCALE

SLOT = reserve_bytes(UNIT)


def plan_of(
    task: Workload, machine: Machine, budget_bytes: int, strategy: str | None = None
) -> Plan:
    budget = Budget.of(budget_bytes, machine)
    return make_plan(task, machine, budget, fingerprint={"graph": "toy"}, strategy=strategy)


def prefetch(op: int, tensor: str) -> Prefetch:
    return Prefetch(op=op, tensor=tensor, link="nvme->cpu", size_bytes=UNIT, address=0)


def homes(plan: Plan) -> dict[str, str]:
    return {name: tensor.home for name, tensor in plan.tensors.items()}


def test_everything_stays_where_it_fits() -> None:
    plan = plan_of(workload(["a", "b", "c"]), cpu_machine(), 3 * SLOT)
    assert homes(plan) == {"a": "cpu", "b": "cpu", "c": "cpu"}
    assert [tensor.address for tensor in plan.tensors.values()] == [0, SLOT, 2 * SLOT]
    assert plan.steps == (Compute(op=0), Compute(op=1), Compute(op=2))
    assert plan.link_bytes == {"nvme->cpu": 0}
    assert plan.arena_bytes == {"cpu": 3 * SLOT}
    assert plan.peak_bytes == {"cpu": 3 * SLOT, "nvme": 0}
    assert plan.certificate.predicted_s == plan.certificate.lower_bound_s == 3.0
    assert (plan.certificate.status, plan.certificate.gap) == (SolverStatus.OPTIMAL, 0.0)
    assert plan.certificate.binding == "compute"


def test_one_slot_streams_everything_through_it() -> None:
    plan = plan_of(workload(["a", "b"]), cpu_machine(), SLOT)
    assert homes(plan) == {"a": "nvme", "b": "nvme"}
    assert plan.steps == (
        prefetch(0, "a"),
        Wait(op=0, tensor="a", address=0),
        Compute(op=0),
        Release(op=1, tensor="a", address=0),
        prefetch(1, "b"),
        Wait(op=1, tensor="b", address=0),
        Compute(op=1),
        Release(op=2, tensor="b", address=0),
    )
    # Nothing overlaps: load, compute, load, compute.
    assert plan.certificate.predicted_s == 4.0
    assert plan.peak_bytes == {"cpu": SLOT, "nvme": 2 * UNIT}


def test_two_slots_hide_the_loads_behind_the_ops() -> None:
    plan = plan_of(workload(["a", "b", "c", "d"]), cpu_machine(), 2 * SLOT)
    assert plan.certificate.predicted_s == 4.0
    assert plan.certificate.gap == 0.0


def test_a_weight_that_stays_takes_its_load_off_the_link() -> None:
    task = workload(["a", "b", "c", "d"], seconds=0.1)
    plan = plan_of(task, cpu_machine(), 3 * SLOT)
    # Two of four are streamed through the third slot: 2 loads of 1 s, each behind an op of 0.1 s.
    assert sorted(homes(plan).values()) == ["cpu", "cpu", "nvme", "nvme"]
    assert plan.certificate.predicted_s == pytest.approx(2.2)


def test_without_repetition_the_first_load_is_waited_for() -> None:
    plan = plan_of(workload(["a", "b"], repeats=False), cpu_machine(), SLOT)
    # One weight stays and is loaded beforehand: no other one fits beside it, so both are streamed.
    assert plan.certificate.predicted_s == 4.0
    plan = plan_of(workload(["a", "bc"], repeats=False), cpu_machine(), 2 * SLOT)
    assert all(step.op <= 1 for step in plan.steps if isinstance(step, Prefetch))


def test_small_weights_stay_because_of_the_latency_of_loading_them() -> None:
    task = workload(["abc", "def"], sizes=dict.fromkeys("abde", PAGE))
    plan = plan_of(task, cpu_machine(latency_s=0.5), 2 * SLOT)
    assert {name for name, home in homes(plan).items() if home == "nvme"} <= {"c", "f"}


def test_states_activations_and_workspace_count() -> None:
    extra = (
        TensorSpec(name="s", size_bytes=7, kind=TensorKind.STATE),
        TensorSpec(name="x", size_bytes=10, kind=TensorKind.INPUT),
        TensorSpec(name="y", size_bytes=100, kind=TensorKind.ACTIVATION),
        TensorSpec(name="z", size_bytes=1000, kind=TensorKind.OUTPUT),
    )
    ops = (
        OpSpec(name="f", time_s={"cpu": 1.0}, reads=("a", "x", "s"), writes=("y",)),
        OpSpec(
            name="g", time_s={"cpu": 1.0}, reads=("a", "y"), writes=("z",), workspace_bytes=10000
        ),
        OpSpec(name="h", time_s={"cpu": 1.0}, reads=("a",)),
    )
    base = workload(["a"], extra=extra)
    task = Workload(name="toy", repeats=True, tensors=base.tensors, ops=ops)
    needed = SLOT + 7 + 100 + 1000 + 10000
    assert plan_of(task, cpu_machine(), needed).peak_bytes["cpu"] == needed
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(task, cpu_machine(), needed - 1)
    assert (caught.value.required_bytes, caught.value.tier) == (needed, "cpu")


def test_an_infeasible_budget_names_the_op_and_the_smallest_budget() -> None:
    task = workload(["a", "bcd", "e"])
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(task, cpu_machine(), 2 * SLOT)
    assert (caught.value.required_bytes, caught.value.op) == (3 * SLOT, "op1")
    assert plan_of(task, cpu_machine(), 3 * SLOT).peak_bytes["cpu"] == 3 * SLOT


def test_reserved_bytes_stay_free() -> None:
    task, machine = workload(["a", "b"]), cpu_machine()
    plan = make_plan(task, machine, Budget(cpu=2 * SLOT + 5), fingerprint={}, reserved_bytes=SLOT)
    assert plan.peak_bytes["cpu"] == SLOT


def test_what_the_slow_tier_cannot_hold_stays() -> None:
    machine = cpu_machine(nvme_bytes=2 * UNIT)
    task = workload(["a", "b", "c", "d"])
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(task, machine, 2 * SLOT)
    assert caught.value.required_bytes == 3 * SLOT
    assert plan_of(task, machine, 3 * SLOT).peak_bytes == {"cpu": 3 * SLOT, "nvme": 2 * UNIT}


def test_a_machine_without_a_slow_tier_needs_all_at_once() -> None:
    whole = cpu_machine()
    machine = Machine(name="ram", places=(whole.tiers["cpu"],), links=())
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(workload(["a", "b"]), machine, SLOT)
    assert caught.value.required_bytes == 2 * SLOT
    assert plan_of(workload(["a", "b"]), machine, 2 * SLOT).certificate.predicted_s == 2.0


def test_two_links_carry_more_than_one() -> None:
    task = workload(list("abcdefghijkl"), seconds=0.0)
    plan = plan_of(task, gpu_machine(), 5 * SLOT)
    assert set(plan.link_bytes) == {"cpu->gpu", "nvme->gpu"}
    assert all(plan.link_bytes.values())
    # A shared uplink of one unit per second leaves nothing to gain from the second link.
    narrow = plan_of(task, gpu_machine(pipe=float(UNIT)), 5 * SLOT)
    assert narrow.certificate.predicted_s > plan.certificate.predicted_s


def test_a_full_cpu_tier_spills_to_nvme() -> None:
    task = workload(["a", "b", "c", "d"], seconds=0.0)
    plan = plan_of(task, gpu_machine(cpu_bytes=UNIT), 2 * SLOT)
    assert plan.peak_bytes["cpu"] <= UNIT


def test_a_weight_that_no_op_reads_costs_no_memory() -> None:
    task = workload(
        ["a"], extra=(TensorSpec(name="idle", size_bytes=UNIT, kind=TensorKind.WEIGHT),)
    )
    plan = plan_of(task, cpu_machine(), SLOT)
    assert (plan.tensors["idle"].home, plan.tensors["a"].home) == ("nvme", "cpu")


def test_a_weight_read_twice_in_a_row_is_loaded_once() -> None:
    plan = plan_of(workload(["a", "a", "b", "b"]), cpu_machine(), SLOT)
    assert plan.link_bytes == {"nvme->cpu": 2 * UNIT}


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="first_fit"):
        plan_of(workload(["a"]), cpu_machine(), SLOT, "best")
    task = workload(["a"])
    lost = Workload(name="toy", repeats=True, tensors=(), ops=task.ops)
    with pytest.raises(ValueError, match="'a'"):
        plan_of(lost, cpu_machine(), SLOT)
    timeless = Workload(
        name="toy", repeats=True, tensors=task.tensors, ops=(OpSpec(name="f", time_s={}),)
    )
    with pytest.raises(UnsupportedOpError, match="'f'"):
        plan_of(timeless, cpu_machine(), SLOT)


def test_a_pinned_plan_shares_its_arena() -> None:
    decode = workload(["a", "b", "c", "d"], seconds=0.1)
    prefill = workload(["ab", "c", "d", "e"], seconds=3.0)
    first = plan_of(decode, cpu_machine(), 4 * SLOT - 1)
    budget = Budget(cpu=4 * SLOT - 1)
    second = make_plan(prefill, cpu_machine(), budget, fingerprint={}, arena_of=first)
    verify(second)
    assert breaks(second) == ""
    assert second.arena_bytes == first.arena_bytes
    for name, tensor in first.tensors.items():
        if tensor.address is not None:
            assert second.tensors[name] == tensor
    assert second.tensors["e"].home == "nvme"
    with pytest.raises(InfeasiblePlanError):
        make_plan(workload(["efg"]), cpu_machine(), budget, fingerprint={}, arena_of=first)


@settings(max_examples=16 * SCALE)
@given(workloads(), machines(), shares())
def test_every_plan_runs_within_its_budget(task: Workload, machine: Machine, share: float) -> None:
    tier = machine.compute_tier
    budget = budget_at(share, task, machine)
    plan = plan_of(task, machine, budget)
    verify(plan)
    assert breaks(plan) == ""
    assert plan.peak_bytes[tier] <= budget
    certificate = plan.certificate
    assert certificate.limit_s <= certificate.lower_bound_s <= certificate.predicted_s
    assert replay_plan(plan).seconds == pytest.approx(certificate.predicted_s, rel=1e-8, abs=1e-12)


@settings(max_examples=8 * SCALE)
@given(workloads(), machines(), shares())
def test_the_answer_is_never_worse_than_any_strategy(
    task: Workload, machine: Machine, share: float
) -> None:
    budget = budget_at(share, task, machine)
    best = plan_of(task, machine, budget).certificate.predicted_s
    for strategy in (*NAMES, "ilp"):
        assert best <= plan_of(task, machine, budget, strategy).certificate.predicted_s


@settings(max_examples=16 * SCALE)
@given(
    workloads(max_weights=11, max_ops=14),
    machines(),
    st.lists(st.floats(0, 1), min_size=2, max_size=4),
)
def test_more_budget_is_never_slower(task: Workload, machine: Machine, parts: list[float]) -> None:
    budgets = sorted(budget_at(share, task, machine) for share in parts)
    times = [plan_of(task, machine, budget).certificate.predicted_s for budget in budgets]
    assert all(slower >= faster for slower, faster in pairwise(times)), (budgets, times)


@settings(max_examples=16 * SCALE)
@given(workloads(), machines())
def test_the_smallest_budget_is_exact(task: Workload, machine: Machine) -> None:
    needed = least_budget(task, machine)
    assert plan_of(task, machine, needed).peak_bytes[machine.compute_tier] == needed
    if needed:
        with pytest.raises(InfeasiblePlanError) as caught:
            plan_of(task, machine, needed - 1)
        assert caught.value.required_bytes == needed


@settings(max_examples=10 * SCALE)
@given(workloads(max_weights=6), shares())
def test_no_resident_set_beats_the_answer(task: Workload, share: float) -> None:
    """Compare with every resident set in every size of the staging region, one page apart."""
    machine = cpu_machine(60e6, 1e-4)
    budget = budget_at(share, task, machine)
    asked = problem(task, machine, Budget(cpu=budget))
    found = plan_of(task, machine, budget).certificate
    best = math.inf
    for count in range(len(asked.weights) + 1):
        for resident in combinations(range(len(asked.weights)), count):
            link_of = tuple(None if i in resident else 0 for i in range(len(asked.weights)))
            placement = Placement(strategy="oracle", link_of=link_of)
            schedule = best_staging(asked, placement, asked.arena_limit_bytes)
            best = min(best, schedule.seconds if schedule else math.inf)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert found.predicted_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("seconds_per_mb", [0.0115e-3, 0.2e-3, 0.45e-3])
def test_a_decoder_gets_no_slower_along_a_curve_of_budgets(seconds_per_mb: float) -> None:
    task, machine = llama(6, seconds_per_mb)
    budgets = [size * MIB for size in (330, 400, 540, 1000, 1500, 1512)]
    plans = [plan_of(task, machine, budget) for budget in budgets]
    times = [plan.certificate.predicted_s for plan in plans]
    assert all(slower >= faster for slower, faster in pairwise(times)), times
    assert plans[-1].link_bytes == {"nvme->cpu": 0}
    assert all(plan.certificate.gap < 0.2 for plan in plans)


@pytest.mark.parametrize("seconds_per_mb", [0.1e-3, 0.2e-3, 0.3e-3])
def test_a_decoder_of_many_weights_gets_no_slower_with_more_memory(seconds_per_mb: float) -> None:
    """Where computing and moving take about the same, the best of very many placements is seldom the first one."""
    task, machine = llama(22, seconds_per_mb)
    assert sum(tensor.kind == TensorKind.WEIGHT for tensor in task.tensors) > MANY_WEIGHTS
    budgets = [mib * MIB for mib in (1070, 1144, 1218, 1810, 1884, 2550, 2624, 3290, 3364, 3660)]
    times = [plan_of(task, machine, budget).certificate.predicted_s for budget in budgets]
    assert times == sorted(times, reverse=True)


def test_a_decoder_of_one_billion_parameters_runs_at_the_speed_of_its_drive() -> None:
    task, machine = llama(22, 0.0115e-3)
    plan = plan_of(task, machine, 1536 * MIB)
    moved_s = plan.link_bytes["nvme->cpu"] / 3e9
    assert moved_s / plan.certificate.predicted_s >= 0.97
    assert plan.link_bytes["nvme->cpu"] <= 4.39e9 - 1536 * MIB + 3 * 46.1e6
    assert plan.certificate.gap <= 0.03


def test_a_weight_that_is_soon_read_again_waits_for_it() -> None:
    """A transposed weight is read by its view and by its product, with others in between."""
    task = workload(["a", "b", "c", "a", "b", "c", "d", "e", "f"], seconds=0.01)
    plan = plan_of(task, cpu_machine(), 3 * SLOT)
    assert plan.link_bytes["nvme->cpu"] <= 6 * UNIT
