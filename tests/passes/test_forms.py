"""Forms of a workload and the choice among them: what is tried, what it is worth, what is proven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.sizes import MIB, reserve_bytes
from gascompile.core.tiles import parse_tile
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.model.tiling import forms, same_form
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from tests.passes.planning import cpu_machine, weight

MACHINE = cpu_machine(bandwidth=100 * MIB, latency_s=1e-4)
ROWS = 4096


def decoder(*, head: int = 40, layers: int = 4, tied: bool = False) -> Workload:
    """Return an embedding, layers of 2 MiB and an output layer; tables have ``head`` MiB."""
    last = "table" if tied else "head"
    tables = {"table": head * MIB, last: head * MIB}
    tensors = [weight(name, size) for name, size in tables.items()]
    tensors.append(TensorSpec(name="%ids", size_bytes=8, kind=TensorKind.INPUT))
    row_bytes = head * MIB // ROWS
    ops = [
        OpSpec(
            name="embed",
            time_s={"cpu": 1e-3},
            reads=("table", "%ids"),
            writes=("%embed",),
            gathers={"table": row_bytes},
        )
    ]
    tensors.append(TensorSpec(name="%embed", size_bytes=row_bytes, kind=TensorKind.ACTIVATION))
    before = "%embed"
    for name, size in [*((f"layer{i}", 2 * MIB) for i in range(layers)), (last, head * MIB)]:
        if name != last:
            tensors.append(weight(name, size))
        ops.append(
            OpSpec(
                name=f"op.{name}",
                time_s={"cpu": size / (400 * MIB)},
                reads=(before, name),
                writes=(f"%{name}",),
                splits={name: ROWS},
            )
        )
        before = f"%{name}"
        kind = TensorKind.OUTPUT if name == last else TensorKind.ACTIVATION
        tensors.append(TensorSpec(name=before, size_bytes=4 * ROWS, kind=kind))
    return Workload(name="decoder", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def whole(workload: Workload) -> Workload:
    """Return the workload as one that nothing can be divided of."""
    ops = tuple(replace(op, splits={}, gathers={}) for op in workload.ops)
    return replace(workload, ops=ops)


def plan(workload: Workload, budget_bytes: int, *, arena_of: Plan | None = None) -> Plan:
    return make_plan(
        workload,
        MACHINE,
        Budget(cpu=budget_bytes),
        fingerprint={},
        time_limit_s=5.0,
        arena_of=arena_of,
    )


def smallest_budget(workload: Workload) -> int:
    with pytest.raises(InfeasiblePlanError) as error:
        plan(workload, 0)
    return error.value.required_bytes


def tile_names(workload: Workload) -> set[str]:
    return {t.name for t in workload.tensors if parse_tile(t.name) is not None}


def test_what_cannot_be_divided_has_one_form() -> None:
    assert forms(whole(decoder()), MACHINE) == [whole(decoder())]
    small = decoder(head=1, layers=1)
    assert forms(small, MACHINE) == [small]


def test_every_form_has_the_same_work() -> None:
    workload = decoder()
    found = forms(workload, MACHINE)
    assert workload in found
    assert {len(tile_names(form)) for form in found} == {0, 3, 11}
    for form in found:
        total = sum(t.size_bytes for t in form.tensors if t.kind == TensorKind.WEIGHT)
        assert total == sum(t.size_bytes for t in workload.tensors if t.kind == TensorKind.WEIGHT)
        compute_s = sum(op.time_s["cpu"] for op in form.ops if not op.gathers)
        assert compute_s == pytest.approx(
            sum(op.time_s["cpu"] for op in workload.ops if not op.gathers)
        )


def test_a_form_is_found_again_by_its_tiles() -> None:
    for form in forms(decoder(), MACHINE):
        assert same_form(decoder(), MACHINE, form) == form


@pytest.mark.parametrize("tied", [False, True])
def test_tiles_need_less_than_the_largest_weight(tied: bool) -> None:
    workload = decoder(tied=tied)
    smallest = smallest_budget(workload)
    assert smallest < reserve_bytes(5 * MIB)
    assert smallest_budget(whole(workload)) > 40 * MIB
    found = plan(workload, smallest)
    assert found.peak_bytes["cpu"] <= smallest
    with pytest.raises(InfeasiblePlanError) as error:
        plan(workload, smallest - 1)
    assert error.value.required_bytes == smallest


@pytest.mark.parametrize("tied", [False, True])
def test_more_budget_is_not_slower_and_dividing_is_not_either(tied: bool) -> None:
    workload = decoder(tied=tied)
    budgets = [6 * MIB, 12 * MIB, 30 * MIB, 60 * MIB, 84 * MIB, 100 * MIB]
    plans = [plan(workload, budget) for budget in budgets]
    times = [found.certificate.predicted_s for found in plans]
    assert times == sorted(times, reverse=True)
    for budget, found in zip(budgets, plans, strict=True):
        if budget > 41 * MIB:
            undivided = plan(whole(workload), budget).certificate
            assert found.certificate.predicted_s <= undivided.predicted_s * 1.01
            # What is proven holds for the undivided form, too.
            assert found.certificate.lower_bound_s <= undivided.predicted_s


def test_a_form_that_can_win_little_is_planned_as_well() -> None:
    """What is known is within the gap of the bound there, and would be of less memory in another form."""
    workload = decoder()
    slow = tuple(replace(op, time_s={"cpu": 4 * op.time_s["cpu"]}) for op in workload.ops)
    workload = replace(workload, ops=slow)
    budgets = [round(mib * MIB) for mib in (79, 80.25, 81.625, 83, 84.375)]
    times = [plan(workload, budget).certificate.predicted_s for budget in budgets]
    assert times == sorted(times, reverse=True)


def test_gathered_bytes_are_counted_and_checked() -> None:
    found = plan(decoder(), 30 * MIB)
    moved = sum(step.size_bytes for step in found.steps if hasattr(step, "size_bytes"))
    row_bytes = 40 * MIB // ROWS
    assert found.tensors["table"].home == "nvme"
    assert found.link_bytes["nvme->cpu"] == moved + row_bytes
    with pytest.raises(PlanVerificationError, match="claims to move"):
        verify(found.with_accounts(link_bytes={**found.link_bytes, "nvme->cpu": moved}))
    strange = replace(found.workload.ops[0], gathers={"nothing": row_bytes})
    ops = (strange, *found.workload.ops[1:])
    with pytest.raises(PlanVerificationError, match=r"gathers .* 'nothing'"):
        verify(replace(found, workload=replace(found.workload, ops=ops)))


def test_a_second_plan_in_the_same_arena_has_the_same_tiles() -> None:
    first = plan(decoder(), 30 * MIB)
    ops = tuple(replace(op, time_s={"cpu": 3 * op.time_s["cpu"]}) for op in decoder().ops)
    second = plan(replace(decoder(), ops=ops), 30 * MIB, arena_of=first)
    assert tile_names(second.workload) == tile_names(first.workload) != set()
    residents = {n: t.address for n, t in first.tensors.items() if t.address is not None}
    assert {n: second.tensors[n].address for n in residents} == residents
