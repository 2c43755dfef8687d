"""Rows that ops gather come from the nearest tier with room for the whole table, where that is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, MIB, PAGE_BYTES, reserve_bytes
from gascompile.core.steps import Prefetch
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.pinned import passing_bytes, pinned_bytes

TABLE = 64 * MIB
ROWS = 1024 * PAGE_BYTES


def machine(*, drive: bool = True, ram: bool = True, latency_s: float = 1e-4) -> Machine:
    """Return a GPU with RAM at 16 GB/s and a drive at 2 GB/s that takes its time for each read."""
    links = []
    if ram:
        links.append(
            Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=16e9, latency_s=1e-6)
        )
    if drive:
        links.append(
            Link(
                source_tier="nvme",
                target_tier="gpu",
                bandwidth_bytes_per_s=2e9,
                latency_s=latency_s,
            )
        )
    places = [Place.named("gpu", GIB), *(Place.named(x.source_tier, 64 * GIB) for x in links)]
    return Machine(name="toy", places=tuple(places), links=tuple(links))


def embedding(rows_bytes: int = ROWS, op_s: float = 1e-3) -> Workload:
    """Return a table of which some rows are needed, and two layers."""
    sizes = {"table": TABLE, "w0": 4 * MIB, "w1": 4 * MIB}
    return Workload(
        name="embedding",
        repeats=True,
        tensors=tuple(
            TensorSpec(name=n, size_bytes=size, kind=TensorKind.WEIGHT) for n, size in sizes.items()
        ),
        ops=(
            OpSpec(
                name="rows", time_s={"gpu": op_s}, reads=("table",), gathers={"table": rows_bytes}
            ),
            OpSpec(name="op0", time_s={"gpu": op_s}, reads=("w0",)),
            OpSpec(name="op1", time_s={"gpu": op_s}, reads=("w1",)),
        ),
    )


def planned(on: Machine, cpu_bytes: int = GIB, task: Workload | None = None) -> Plan:
    limits = {"gpu": 16 * MIB, "cpu": cpu_bytes}
    budget = Budget(gpu=limits["gpu"], cpu=cpu_bytes if "cpu" in on.tiers else None)
    return make_plan(task or embedding(), on, budget, fingerprint={}, mip_gap=0.0)


def test_rows_come_from_ram_where_the_table_fits_there() -> None:
    plan = planned(machine())
    assert plan.tensors["table"].home == "cpu"
    assert plan.workload.ops[0].gather_tier == "cpu"
    assert plan.link_bytes["cpu->gpu"] >= ROWS
    # A drive more makes no plan slower.
    without = planned(machine(drive=False)).certificate.predicted_s
    assert plan.certificate.predicted_s <= without * (1 + 1e-9)
    far = planned(machine(ram=False)).certificate.predicted_s
    assert plan.certificate.predicted_s < far / 3


def test_a_table_larger_than_ram_stays_on_the_drive() -> None:
    plan = planned(machine(), cpu_bytes=TABLE)
    assert plan.tensors["table"].home == "nvme"
    assert plan.workload.ops[0].gather_tier == ""


def test_the_table_counts_as_pinned_memory() -> None:
    plan = planned(machine())
    steps = [s for s in plan.steps if isinstance(s, Prefetch)]
    others = {s.tensor for s in steps if s.link == "cpu->gpu"}
    sizes = sum(reserve_bytes(plan.tensors[n].size_bytes) for n in {"table", *others})
    passing = passing_bytes(plan.workload.ops, plan.machine.io)
    assert pinned_bytes(plan) == passing + sizes


def test_rows_are_not_gathered_where_their_weight_does_not_lie() -> None:
    plan = planned(machine())
    moved = {**plan.tensors, "table": replace(plan.tensors["table"], home="nvme")}
    with pytest.raises(PlanVerificationError):
        verify(replace(plan, tensors=moved))


@settings(max_examples=15)
@given(
    st.integers(1, 4000),
    st.floats(1e-5, 3e-4),
    st.sampled_from([1e-5, 1e-3]),
    st.sampled_from([TABLE // 2, 2 * TABLE, GIB]),
)
def test_a_tier_more_makes_no_plan_slower(
    num_rows: int, latency_s: float, op_s: float, cpu_bytes: int
) -> None:
    task = embedding(num_rows * PAGE_BYTES, op_s)
    both = planned(machine(latency_s=latency_s), cpu_bytes, task).certificate.predicted_s
    drive = planned(machine(ram=False, latency_s=latency_s), 0, task).certificate.predicted_s
    assert both <= drive * 1.01 + 1e-9
    if cpu_bytes > TABLE * 1.5:
        ram = planned(machine(drive=False), cpu_bytes, task).certificate.predicted_s
        assert both <= ram * 1.01 + 1e-9
