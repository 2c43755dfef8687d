"""What the smallest feasible budget is made of adds up to it."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import TensorKind, TensorSpec, Workload
from gascompile.passes.plan.make_plan import make_plan
from tests.passes.planning import (
    PAGE,
    UNIT,
    cpu_machine,
    least_budget,
    machines,
    workload,
    workloads,
)


def _refused(task: Workload, machine: Machine) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(task, machine, Budget.of(0, machine), fingerprint={})
    return caught.value


def test_a_refusal_lists_what_it_needs_where() -> None:
    state = TensorSpec(name="state", size_bytes=3 * PAGE, kind=TensorKind.STATE)
    error = _refused(workload(["a", "bc"], sizes={"c": 7 * PAGE}, extra=[state]), cpu_machine())
    room = reserve_bytes(UNIT)
    assert [(d.kind, d.name, d.size_bytes, d.op) for d in error.demands] == [
        ("weight", "b", room, "op1"),
        ("weight", "c", 8 * PAGE, "op1"),
        ("state", "state", 3 * PAGE, ""),
    ]
    assert error.required_bytes == room + 11 * PAGE
    assert "weight 432.00 KiB ('b', 'c') at 'op1', state 12.00 KiB ('state')" in str(error)
    assert pickle.loads(pickle.dumps(error)).demands == error.demands


@settings(max_examples=60, deadline=None)
@given(task=workloads(), on=machines())
def test_demands_add_up(task: Workload, on: Machine) -> None:
    if not least_budget(task, on):
        return
    error = _refused(task, on)
    assert sum(demand.size_bytes for demand in error.demands) == error.required_bytes
    assert all(demand.size_bytes >= 0 for demand in error.demands)
