"""Small tensors stay in their place where that is little memory, and bounds hold for plans that move them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.steps import Offload, Release
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.intervals import IntervalPlan
from tests.passes.planning import drive
from tests.passes.step_interpreter import simulate

LARGE, SMALL, COUNT = 2000, 1, 40
NUM_SMALL = COUNT * SMALL


def updates() -> Workload:
    """Return updates of pairs of a large and a small state, all in turn."""
    names = [(f"large{i}", f"small{i}") for i in range(COUNT)]
    tensors = [
        TensorSpec(name=name, size_bytes=size, kind=TensorKind.STATE)
        for pair in names
        for name, size in zip(pair, (LARGE, SMALL), strict=True)
    ]
    ops = [
        OpSpec(name=f"op{i}", reads=p, writes=p, time_s={"cpu": 1.0}) for i, p in enumerate(names)
    ]
    return Workload(name="updates", ops=tuple(ops), tensors=tuple(tensors), repeats=True)


def with_latency(latency_s: float) -> Machine:
    machine = drive(1000.0, 1000.0)
    links = tuple(replace(link, latency_s=latency_s) for link in machine.links)
    places = tuple(replace(place, size_bytes=1 << 20) for place in machine.places)
    return replace(machine, links=links, places=places)


def leaving(found: IntervalPlan) -> set[str]:
    return {step.tensor for step in found.steps if isinstance(step, (Offload, Release))}


def check(found: IntervalPlan, workload: Workload, machine: Machine, limit_bytes: int) -> None:
    run = simulate(workload, machine, found.steps, found.homes, limits_bytes={"cpu": limit_bytes})
    assert run.seconds == pytest.approx(found.seconds)


def plan(machine: Machine, limit_bytes: int) -> IntervalPlan:
    found = plan_intervals(updates(), machine, {"cpu": limit_bytes}, effort=Effort(time_limit_s=1))
    check(found, updates(), machine, limit_bytes)
    return found


def test_what_is_mostly_latency_to_move_stays() -> None:
    found = plan(with_latency(0.01), 10 * LARGE)
    gone = leaving(found)
    assert any(name.startswith("large") for name in gone)
    assert not any(name.startswith("small") for name in gone)


def test_the_bound_holds_for_plans_that_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_latency(0.01)
    for limit_bytes in (6 * LARGE, 10 * LARGE, 30 * LARGE):
        found = plan(machine, limit_bytes)
        with monkeypatch.context() as patch:
            patch.setattr("gascompile.passes.intervals.plan_intervals.FEW_TENSORS", 1000)
            free = plan(machine, limit_bytes)
        assert found.bound_s <= free.seconds * (1 + 1e-9)


def test_it_leaves_where_nothing_fits_otherwise() -> None:
    limit_bytes = 128 * NUM_SMALL
    # One pair, beside which there is room for some of the small ones, and not for all.
    room = limit_bytes - LARGE - NUM_SMALL // 2
    workload = updates()
    weight = TensorSpec(name="pinned", size_bytes=room, kind=TensorKind.ACTIVATION)
    ops = tuple(
        replace(
            op,
            reads=(*op.reads, *(("pinned",) if i else ())),
            writes=(*op.writes, *(() if i else ("pinned",))),
        )
        for i, op in enumerate(workload.ops)
    )
    workload = replace(workload, ops=ops, tensors=(*workload.tensors, weight))
    machine = with_latency(0.01)
    found = plan_intervals(workload, machine, {"cpu": limit_bytes}, effort=Effort(time_limit_s=1))
    check(found, workload, machine, limit_bytes)
    assert any(name.startswith("small") for name in leaving(found))
    with pytest.raises(InfeasiblePlanError):
        plan_intervals(workload, machine, {"cpu": room + LARGE}, effort=Effort(time_limit_s=1))
