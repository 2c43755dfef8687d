"""What ops of two sites lose to each other: shares by hand, in the clock, its trace and plans; measured here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.machine import check_machine
from gascompile.core.errors import FormatError
from gascompile.core.machine import Contention, InterferencePoint, Machine
from gascompile.core.steps import Compute, Step, Wait
from gascompile.core.workload import OpSpec
from gascompile.cost_models.formulas.contention import contended
from gascompile.cost_models.measure.compute import ColdWeights
from gascompile.cost_models.measure.contention import contention_points
from gascompile.cost_models.simulate.replay import replay, replay_plan
from gascompile.cost_models.simulate.trace import trace
from gascompile.machines.meetings import with_meetings
from gascompile.passes.plan.make_plan import make_plan
from tests.cost_models.test_op_sites import MACHINE, back, op, out
from tests.passes.test_sites import ROOM, machine, planned, towers


def losing(where: Machine, *shares: float) -> Machine:
    """Return a machine whose ops lose these shares of their speed at 0, 10, 20 ... FLOP per byte."""
    points = tuple(
        InterferencePoint(flops_per_byte=10.0 * i, lost_share=share)
        for i, share in enumerate(shares)
    )
    return replace(where, contention=Contention(points=points))


def work(intensity: float) -> OpSpec:
    return OpSpec(
        name="op",
        time_s={"gpu": 1.0},
        reads=(),
        writes=(),
        flops=int(intensity * 100),
        read_bytes=100,
    )


def test_an_op_loses_what_is_lost_at_its_intensity_while_the_other_site_is_at_ops() -> None:
    ops, sites = [work(0.0), work(5.0), work(40.0)], ["gpu", "cpu", "cpu"]
    two = losing(MACHINE, 0.5, 0.2)
    # The accelerator is busy for 2 s, the host for 4: the first loses all the time, the others half of it.
    found = contended(ops, [2.0, 1.0, 3.0], sites, two)
    assert found == pytest.approx([2 / (1 - 0.5), 0.5 + 0.5 / (1 - 0.35), 1.5 + 1.5 / (1 - 0.2)])


@pytest.mark.parametrize(
    ("where", "sites"),
    [(MACHINE, ["gpu", "cpu"]), (losing(MACHINE, 0.5), ["gpu", "gpu"]), (losing(MACHINE), "gc")],
)
def test_nothing_is_lost_at_one_site_or_where_nothing_was_measured(
    where: Machine, sites: list[str]
) -> None:
    assert contended([work(0.0)] * 2, [1.0, 2.0], sites, where) == [1.0, 2.0]


def test_clock_and_trace_of_a_plan_say_the_same_with_what_is_lost() -> None:
    workload, budget = towers(3, gpu_s=1.0, cpu_s=1.0), Budget(gpu=3 * ROOM + 100)
    plan = make_plan(workload, losing(machine(0.25), 0.2), budget, fingerprint={})
    calm = planned(workload, 0.25, 1)
    assert {op.site for op in plan.ops} == {op.site for op in calm.ops} == {"gpu", "cpu"}
    # Three ops on either site, each of which takes a second alone; what crosses takes next to nothing.
    assert calm.certificate.predicted_s == pytest.approx(3.0, rel=1e-3)
    assert plan.certificate.predicted_s == pytest.approx(3 / 0.8, rel=1e-3)
    # No choice of sites is faster: what the bound leaves out is how the least of it is looked for.
    assert calm.certificate.lower_bound_s == pytest.approx(3.0, rel=1e-3)
    assert plan.certificate.lower_bound_s == pytest.approx(3 / 0.8, rel=1e-2)
    assert replay_plan(plan).seconds == plan.certificate.predicted_s == trace(plan).seconds
    assert max(op.ended_s for op in trace(plan).ops) == pytest.approx(3 / 0.8, rel=1e-3)
    # The times of the plan stay those of the workload: what is asked of another machine is told of that one.
    assert replay_plan(plan, machine(0.25)).seconds == pytest.approx(3.0, rel=1e-3)


def test_sites_that_take_turns_are_not_both_used() -> None:
    workload, budget = towers(3, gpu_s=1.0, cpu_s=1.0), Budget(gpu=3 * ROOM + 100)
    plan = make_plan(workload, losing(machine(0.25), 0.55), budget, fingerprint={})
    assert {op.site for op in plan.ops} == {"gpu"}
    assert plan.certificate.predicted_s == pytest.approx(6.0, rel=1e-3)


def test_a_machine_file_keeps_what_is_lost_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    two = losing(MACHINE, 0.25, 0.0)
    serial.write_atomic(tmp_path / "two.json", serial.dumps(two))
    assert serial.load(Machine, tmp_path / "two.json") == two
    assert "contention" not in serial.dumps(MACHINE)
    check_machine(two, where="two")
    with pytest.raises(FormatError, match=r"contention\.points\[0\].*lost share"):
        check_machine(losing(MACHINE, 1.0), where="two")


def test_sites_that_meet_take_time_for_it() -> None:
    meeting = Contention(points=(), start_s=0.5, give_s=0.25, give_s_per_byte=0.01, wake_s=0.125)
    where = replace(MACHINE, contention=meeting)
    ops = [op("a", 5.0, "x", "a"), op("b", 4.0, "x", "b"), op("c", 1.0, "a b", "c")]
    times_s = [spec.time_s["gpu"] for spec in ops]
    steps: list[Step] = [Compute(op=0), Compute(op=1), back(2, "b", 10), Wait(op=2, tensor="b")]
    steps.append(Compute(op=2))
    # b is made at 4.5 and handed over at 4.85; its copy starts at 5, where the other is done, and takes 1.
    found = replay(steps, ops, times_s, where, repeats=False, sites=["gpu", "cpu", "gpu"])
    assert found.seconds == pytest.approx(5 + 1 + 0.125 + 1)
    steps = [Compute(op=0), out(1, "a", 10), Compute(op=1), Wait(op=2, tensor="a"), Compute(op=2)]
    found = replay(steps, ops, times_s, where, repeats=False, sites=["gpu", "cpu", "cpu"])
    # a is handed over at 5.35 and there at 6.475; before that the other site was at b.
    assert found.seconds == pytest.approx(5 + 0.35 + 1 + 0.125 + 1)
    with pytest.raises(FormatError, match=r"contention\.wake_s"):
        check_machine(replace(where, contention=replace(meeting, wake_s=-1.0)), where="two")


def test_meetings_are_measured_where_contention_is() -> None:
    found = with_meetings(replace(MACHINE, contention=Contention(points=()))).contention
    assert found is not None
    assert min(found.start_s, found.give_s + found.give_s_per_byte) > 0 <= found.wake_s
    assert with_meetings(MACHINE) == MACHINE


def test_what_is_measured_are_shares_by_intensity() -> None:
    threads = torch.get_num_threads()
    points = contention_points(ColdWeights(32 << 20), limit_s=0.01)
    assert torch.get_num_threads() == threads
    assert [point.flops_per_byte for point in points] == sorted({p.flops_per_byte for p in points})
    assert all(0 <= point.lost_share < 1 for point in points)
