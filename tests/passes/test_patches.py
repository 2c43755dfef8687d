"""States of which only some rows change: what leaves with them, in plans and in what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Step
from gascompile.core.workload import PERSISTENT, Workload
from gascompile.passes.bounds.prove_all import relaxed_bound_s
from gascompile.passes.model.interval_problem import interval_problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.plan.move_anything import OnHeap
from gascompile.passes.verify.walk import verify
from tests.passes.planning import drive, task
from tests.passes.random_workloads import Case, cases, op
from tests.scale import SCALE


def patched(workload: Workload, chance: random.Random) -> Workload:
    """Return a workload in which some ops change a part alone of what lasts."""
    lasting = {t.name: t.size_bytes for t in workload.tensors if t.kind in PERSISTENT}
    ops = (
        replace(
            spec,
            patches={
                name: chance.randint(0, lasting[name])
                for name in spec.writes
                if name in lasting and chance.random() < 0.8
            },
        )
        for spec in workload.ops
    )
    return replace(workload, ops=tuple(ops))


def plan_of(case: Case) -> Plan:
    return make_plan(
        case.workload,
        case.machine,
        Budget(
            gpu=case.limits_bytes.get("gpu"),
            cpu=case.limits_bytes.get("cpu"),
            nvme=case.limits_bytes.get("nvme"),
        ),
        fingerprint={},
        time_limit_s=2.0,
        move_all=True,
        has_arena=False,
    )


def too_little(plan: Plan) -> list[str]:
    """Return what carries less than has changed, by counting through iterations from a known beginning."""
    sizes = {t.name: t.size_bytes for t in plan.workload.tensors}
    target = {link.name: link.target_tier for link in plan.machine.links}
    newer = {
        (name, tier): sizes[name] if tier != plan.tensors[name].home else 0
        for name in sizes
        for tier in plan.machine.tiers
    }
    found = []
    for _ in range(3):
        for step in plan.steps:
            match step:
                case Compute():
                    spec = plan.workload.ops[step.op]
                    for name in dict.fromkeys(spec.writes):
                        part = spec.patches.get(name, sizes[name])
                        for tier in plan.machine.tiers:
                            key = (name, tier)
                            newer[key] = min(newer[key] + part, sizes[name])
                case Offload():
                    key = (step.tensor, target[step.link])
                    if step.size_bytes < newer[key]:
                        found.append(step.tensor)
                    newer[key] = 0
                case _:
                    pass
    return found


@settings(max_examples=20 * SCALE)
@given(case=cases(repeats=True), seed=st.integers(0, 2**16))
def test_plans_carry_all_that_changes(case: Case, seed: int) -> None:
    case = replace(case, workload=patched(case.workload, random.Random(seed)))
    try:
        plan = plan_of(case)
    except InfeasiblePlanError:
        return
    assert too_little(plan) == []
    smaller = [
        (i, step)
        for i, step in enumerate(plan.steps)
        if isinstance(step, Offload) and step.size_bytes > 0
    ]
    for i, step in smaller[:2]:
        steps: list[Step] = list(plan.steps)
        steps[i] = replace(step, size_bytes=step.size_bytes - 1)
        broken = replace(plan, steps=tuple(steps))
        if too_little(broken):
            with pytest.raises(PlanVerificationError):
                verify(broken)


CACHE = task(
    "k:state:40 v:state:40 w:weight:8 x:activation:2 y:activation:2",
    replace(op("write k", 1, "w", "k x"), patches={"k": 1}),
    op("read k", 4, "k x", "y"),
    replace(op("write v", 1, "y", "v"), patches={"v": 1}),
    op("read v", 4, "v", ""),
)


def on_heap_plan(workload: Workload, budget: int, on_heap: OnHeap | None) -> Plan:
    return make_plan(
        workload,
        drive(40.0, 1.0),
        Budget(cpu=budget, nvme=200),
        fingerprint={},
        time_limit_s=2.0,
        on_heap=on_heap,
    )


def test_a_cache_that_does_not_fit_leaves_by_its_rows() -> None:
    plan = on_heap_plan(CACHE, 64, OnHeap())
    out = [s for s in plan.steps if isinstance(s, Offload)]
    assert out
    assert {s.size_bytes for s in out} == {1}
    # Two writes of 40 bytes over that link would take 80 s.
    assert plan.certificate.predicted_s < 20
    whole = replace(CACHE, ops=tuple(replace(spec, patches={}) for spec in CACHE.ops))
    assert on_heap_plan(whole, 64, OnHeap()).certificate.predicted_s > 40


def test_nothing_is_searched_where_weights_alone_take_memory() -> None:
    wanted = on_heap_plan(CACHE, 10_000, None)
    found = on_heap_plan(CACHE, 10_000, OnHeap())
    assert replace(found, certificate=wanted.certificate) == wanted


def test_states_that_have_to_stay_are_refused_as_before() -> None:
    with pytest.raises(InfeasiblePlanError) as before:
        on_heap_plan(CACHE, 64, None)
    with pytest.raises(InfeasiblePlanError) as found:
        on_heap_plan(CACHE, 64, OnHeap(staying=frozenset({"k", "v"})))
    assert str(found.value) == str(before.value)


def test_the_bytes_of_an_iteration_that_runs_once_are_all_of_it() -> None:
    once = replace(CACHE, repeats=False)
    plan = make_plan(
        once,
        drive(40.0, 40.0),
        Budget(cpu=64, nvme=200),
        fingerprint={},
        time_limit_s=2.0,
        move_all=True,
        has_arena=False,
    )
    assert all(s.size_bytes == 40 for s in plan.steps if isinstance(s, Offload))


def test_the_bound_counts_of_a_state_what_changes() -> None:
    plan = on_heap_plan(CACHE, 64, OnHeap())
    numbered = interval_problem(CACHE, plan.machine, {"cpu": 64, "nvme": 200})
    assert 0 < relaxed_bound_s(numbered, 2.0) <= plan.certificate.predicted_s * (1 + 1e-6)


LAYERS = 34


def layered() -> Workload:
    """Return layers with keys and values of 80 bytes, one of which changes, and a weight of 8."""
    each = range(LAYERS)
    states = " ".join(f"k{i}:state:80 v{i}:state:80 w{i}:weight:8" for i in each)
    values = " ".join(f"x{i}:activation:1" for i in range(LAYERS + 1))
    ops = []
    for i in each:
        ops += [
            op(f"project{i}", 0.1, f"x{i} w{i}" if i else "w0", f"y{i}"),
            replace(op(f"keys{i}", 0, f"y{i}", f"k{i}"), patches={f"k{i}": 1}),
            replace(op(f"values{i}", 0, f"y{i}", f"v{i}"), patches={f"v{i}": 1}),
            op(f"attend{i}", 1.4, f"y{i} k{i} v{i}", f"x{i + 1}"),
        ]
    return task(f"{states} {values} " + " ".join(f"y{i}:activation:1" for i in each), *ops)


def test_the_next_state_comes_back_while_one_is_in_use() -> None:
    # Of 5440 bytes of states and 272 of weights 1300 fit; a state comes back in 4 seconds, an attention takes 1.4.
    workload, budget = layered(), 1300
    plan = make_plan(
        workload,
        drive(20.0, 20.0),
        Budget(cpu=budget, nvme=100_000),
        fingerprint={},
        on_heap=OnHeap(recompute=False),
    )
    least_s = (LAYERS * 168 - budget) / 20.0
    assert plan.certificate.lower_bound_s <= plan.certificate.predicted_s
    assert plan.certificate.predicted_s <= 1.08 * least_s
