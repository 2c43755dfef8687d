"""The clock ends every search: what counts is how much work is done, told by a clock that ticks per schedule."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings

from benchmarks.training_plans import layered_trace
from benchmarks.training_traces import reference_machine
from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.plan import Plan, SolverStatus
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import OpSpec, Workload
from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.bounds.prove import quick_proof
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.problem import Problem, problem
from gascompile.passes.model.tiling import FormSolution, best_form
from gascompile.passes.plan.feasible import feasible
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search import place, search
from gascompile.passes.search.schedule import schedule
from gascompile.passes.search.strategies import strategies
from gascompile.passes.verify.walk import verify
from tests.hop_plans import on_gpu
from tests.passes.planning import UNIT, cpu_machine, gpu_machine, weight, workload
from tests.passes.random_workloads import Case, cases
from tests.runtime.devices.machines import accelerator
from tests.scale import SCALE

SLOT = reserve_bytes(UNIT)


def many(num_ops: int, num_weights: int) -> Workload:
    """Return ops that read the weights in turn."""
    ops = tuple(
        OpSpec(name=f"op{i}", time_s={"cpu": 0.1, "gpu": 0.1}, reads=(f"w{i % num_weights}",))
        for i in range(num_ops)
    )
    tensors = tuple(weight(f"w{i}", UNIT) for i in range(num_weights))
    return Workload(name="many", repeats=True, tensors=tensors, ops=ops)


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the schedules of a search, each of which takes a second of its clock."""
    made: list[int] = []
    real = schedule

    def counted(*args: object, **options: object) -> object:
        made.append(1)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("gascompile.passes.search.search.schedule", counted)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(made)))
    return made


@pytest.mark.parametrize("num_weights", [40, 300])
def test_a_search_ends_with_its_clock(schedules: list[int], num_weights: int) -> None:
    task = problem(many(num_weights, num_weights), cpu_machine(), Budget(cpu=9 * SLOT))
    found = search.search(task, strategies(task), task.arena_limit_bytes, time_limit_s=3.0)
    assert found is not None
    assert 1 <= len(schedules) <= 4


def test_a_search_without_time_still_returns_a_schedule(schedules: list[int]) -> None:
    task = problem(many(40, 40), cpu_machine(), Budget(cpu=9 * SLOT))
    assert search.search(task, strategies(task), task.arena_limit_bytes, time_limit_s=-1.0)
    assert len(schedules) == 1


def test_a_search_makes_no_more_members_than_it_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With everything resident nothing is faster, so one bound per family is enough."""
    task = problem(many(300, 300), gpu_machine(), Budget(gpu=301 * SLOT))
    asked = count()
    real = physical_limit

    def counted(*args: object, **options: object) -> object:
        next(asked)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("gascompile.passes.search.search.physical_limit", counted)
    assert search.search(task, strategies(task), task.arena_limit_bytes)
    assert next(asked) <= 2 * len(strategies(task))


def test_a_program_that_takes_too_long_to_build_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = problem(many(40_001, 2), cpu_machine(), Budget(cpu=9 * SLOT))
    monkeypatch.setattr(place, "_build", lambda *_: pytest.fail("it was built"))
    found = place.place(task, 2 * SLOT, time_limit_s=1.0, mip_gap=0.01, relaxed=True)
    assert (found.placement, found.bound_s, found.timed_out) == (None, 0.0, True)


def test_forms_that_are_left_when_the_clock_ends_keep_their_bounds() -> None:
    """What was not planned may be faster: its limit stays part of the proof."""
    slow, quick = (
        problem(workload(["a", "b"], seconds=s), cpu_machine(), Budget(cpu=SLOT))
        for s in (0.2, 0.1)
    )
    solved: list[Problem] = []

    def solve(task: Problem) -> FormSolution:
        found = search.search(task, strategies(task), task.arena_limit_bytes)
        assert found is not None
        solved.append(task)
        return FormSolution(task=task, schedule=found, proof=quick_proof(task))

    found = best_form([slow, quick], solve, Effort(time_limit_s=0.0, mip_gap=0.0))
    assert len(solved) == 1
    assert found.proof.timed_out
    assert found.proof.limit_s == min(quick_proof(task).limit_s for task in (slow, quick))


def test_a_form_that_does_not_fit_gives_way_even_after_the_clock() -> None:
    small = problem(workload(["ab"]), cpu_machine(), Budget(cpu=SLOT))
    fits = problem(workload(["a", "b", "a", "b", "a"]), cpu_machine(), Budget(cpu=SLOT))

    def solve(task: Problem) -> FormSolution:
        feasible(task)
        found = search.search(task, strategies(task), task.arena_limit_bytes)
        assert found is not None
        return FormSolution(task=task, schedule=found, proof=quick_proof(task))

    assert best_form([small, fits], solve, Effort(time_limit_s=0.0, mip_gap=0.0)).task is fits
    with pytest.raises(InfeasiblePlanError):
        best_form([small], solve, Effort(time_limit_s=0.0, mip_gap=0.0))


@pytest.mark.parametrize("num_weights", [30, 300])
def test_a_plan_without_any_time_is_honest(num_weights: int) -> None:
    machine = gpu_machine()
    plan = make_plan(
        many(num_weights, num_weights),
        machine,
        Budget(gpu=9 * SLOT),
        fingerprint={},
        time_limit_s=0.0,
        move_all=True,
        mip_gap=0.0,
    )
    verify(plan)
    full = make_plan(
        many(num_weights, num_weights), machine, Budget(gpu=9 * SLOT), fingerprint={}, mip_gap=0.0
    )
    assert plan.certificate.status == SolverStatus.TIMEOUT
    assert plan.certificate.lower_bound_s <= full.certificate.predicted_s * (1 + 1e-9)


def planned(case: Case, tick_s: float) -> Plan | None:
    """Return the plan of a step under a clock that goes on by so much whenever it is read."""
    ticks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: next(ticks) * tick_s)
        try:
            return make_plan(
                case.workload,
                case.machine,
                Budget.of(case.limits_bytes[case.machine.compute_tier], case.machine),
                fingerprint={},
                time_limit_s=0.5,
                move_all=True,
                has_arena=False,
            )
        except InfeasiblePlanError:
            return None


def assert_equal_however_slow(case: Case) -> None:
    quick, slow = (planned(case, tick_s) for tick_s in (0.0, 5e-5))
    assert (quick is None) == (slow is None)
    if quick is not None and slow is not None:
        assert quick.steps == slow.steps
        assert quick.certificate.lower_bound_s == slow.certificate.lower_bound_s
        assert quick.certificate.status == slow.certificate.status


@settings(max_examples=5 * SCALE, deadline=None)
@given(cases(max_tensors=25, max_ops=30).filter(lambda case: len(case.workload.ops) > 8))
def test_a_busy_machine_plans_the_same_steps(case: Case) -> None:
    """A slow machine reads the same clock later; as long as the limit is not reached, that decides nothing."""
    assert_equal_however_slow(case)


@pytest.mark.parametrize("need", [3.0, 6.0])
def test_a_busy_machine_plans_the_same_training_step(need: float) -> None:
    task, machine = layered_trace(20, need), reference_machine()
    limits = {tier: spec.size_bytes for tier, spec in machine.tiers.items()}
    case = Case(seed=0, workload=task, machine=machine, limits_bytes=limits)
    assert_equal_however_slow(case)


@pytest.mark.parametrize("letters", ["abcdef", "abababcdcdcdefefef", "abcdefghcdab"])
def test_a_busy_machine_finds_the_same_ways_in_two_hops(letters: str) -> None:
    """Whatever takes most of the time that there is, no search gets less of it than it counts."""
    task = on_gpu(workload(list(letters), seconds=1e-3))
    budget = Budget(gpu=2 * SLOT, cpu=3 * SLOT)
    machine = accelerator(up=240e6, down=240e6, nvme=60e6, latency_s=1e-4)
    time_limit_s, share, reads = 20.0, 0.9, count()

    def plan_with(tick_s: float) -> Plan:
        ticks = count()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: next(reads) * 0 + next(ticks) * tick_s)
            return make_plan(task, machine, budget, fingerprint={}, time_limit_s=time_limit_s)

    quick = plan_with(0.0)
    slow = plan_with(share * time_limit_s / next(reads))
    assert quick.steps == slow.steps
    assert quick.certificate.lower_bound_s == slow.certificate.lower_bound_s
    assert quick.certificate.status == slow.certificate.status
