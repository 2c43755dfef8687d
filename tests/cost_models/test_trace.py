"""The trace of plans whose times and bytes can be added in the head, and its agreement with the replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine, Pipe
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Offload, Release, Wait
from gascompile.core.workload import Workload
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.cost_models.simulate.trace import BANDWIDTH, LINK_BUSY, MEMORY, Trace, trace
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from gascompile.report.perfetto import perfetto
from tests.cost_models.hand_plans import MB, fetch, hand_plan, machine, streaming, training
from tests.passes.planning import budget_at, machines, shares, workloads
from tests.passes.random_workloads import Case, cases


def test_ops_transfers_and_stalls_of_a_streaming_plan() -> None:
    # w0 arrives 4 s after op1 has ended, w1 2 s after op0: 4 + 1 + 2 + 1 seconds.
    found = trace(streaming())
    assert found.seconds == pytest.approx(8.0)
    spans = [(s.op, s.site, s.begun_s, s.ended_s) for s in found.ops]
    assert spans == [(0, "gpu", 4.0, 5.0), (1, "gpu", 7.0, 8.0)]
    moved = [(t.tensor, t.issued_s, t.begun_s, t.arrived_s, t.needed_s) for t in found.transfers]
    assert moved == [
        ("w0", 0.0, 0.0, 4.0, 0.0),
        ("w1", 5.0, 5.0, 7.0, 5.0),
        # That of the next iteration.
        ("w0", 8.0, 8.0, 12.0, None),
    ]
    stalls = [(s.op, s.tensor, s.time_s, s.link, s.cause, s.blocker) for s in found.stalls]
    assert stalls == [
        (0, "w0", 4.0, "cpu->gpu", MEMORY, "w1"),
        (1, "w1", 2.0, "cpu->gpu", MEMORY, "w0"),
    ]
    assert found.link_bytes == {"cpu->gpu": 6 * MB}


def test_memory_of_a_streaming_plan() -> None:
    found = trace(streaming())
    gpu = found.memory["gpu"]
    w0, w1 = reserve_bytes(4 * MB), reserve_bytes(2 * MB)
    assert list(gpu.bytes_by_use) == ["streamed weights"]
    levels = dict(zip(gpu.times_s, gpu.total_bytes, strict=True))
    # At 5 s w0 leaves and w1 takes its place; at 8 s the other way round.
    assert levels == {0.0: w0, 5.0: w1, 8.0: w0}
    assert gpu.peak_bytes == w0
    assert set(found.memory["cpu"].total_bytes) == {6 * MB}


def test_two_transfers_in_a_row_blame_the_link() -> None:
    plan = hand_plan(
        {"w0": 4, "w1": 2},
        [("w0", "", 1.0), ("w1", "", 20.0)],
        [
            fetch(0, "w0", 4),
            fetch(0, "w1", 2, 8 * MB // 4096 * 4096),
            Wait(op=0, tensor="w0", address=0),
            Compute(op=0),
            Wait(op=1, tensor="w1", address=8 * MB // 4096 * 4096),
            Compute(op=1),
            Release(op=2, tensor="w0", address=0),
            Release(op=2, tensor="w1", address=8 * MB // 4096 * 4096),
        ],
        homes={"w0": "cpu", "w1": "cpu"},
        repeats=False,
    )
    found = trace(plan)
    causes = [(s.tensor, s.time_s, s.cause, s.blocker) for s in found.stalls]
    assert causes == [("w0", 4.0, BANDWIDTH, ""), ("w1", 1.0, LINK_BUSY, "w0")]
    assert found.seconds == pytest.approx(26.0)


def test_a_link_that_is_never_idle_is_named_as_such() -> None:
    # Two places, so that each weight is under way while the other one is used.
    there = 8 * MB // 4096 * 4096
    plan = hand_plan(
        {"w0": 4, "w1": 2},
        [("w0", "", 1.0), ("w1", "", 1.0)],
        [
            Wait(op=0, tensor="w0", address=0),
            fetch(0, "w1", 2, there),
            Compute(op=0),
            Release(op=1, tensor="w0", address=0),
            Wait(op=1, tensor="w1", address=there),
            fetch(1, "w0", 4),
            Compute(op=1),
            Release(op=2, tensor="w1", address=there),
        ],
        homes={"w0": "cpu", "w1": "cpu"},
    )
    found = trace(plan)
    assert found.seconds == pytest.approx(6.0)
    assert {(s.cause, s.time_s) for s in found.stalls} == {(BANDWIDTH, 3.0), (BANDWIDTH, 1.0)}


def test_a_shared_pipe_delays_the_other_link() -> None:
    shared = machine()
    pipe = Pipe(name="uplink", bandwidth_bytes_per_s=MB)
    links = tuple(replace(link, shared=("uplink",)) for link in shared.links)
    plan = hand_plan(
        {"a0": 3, "w0": 2},
        [("", "a0", 1.0), ("a0 w0", "", 1.0)],
        [
            Compute(op=0),
            Offload(op=1, tensor="a0", link="gpu->cpu", size_bytes=3 * MB),
            fetch(1, "w0", 2),
            Wait(op=1, tensor="w0", address=0),
            Wait(op=1, tensor="a0"),
            Compute(op=1),
            Release(op=2, tensor="w0", address=0),
        ],
        homes={"w0": "cpu"},
        repeats=False,
        on=replace(shared, links=links, pipes=(pipe,)),
    )
    found = trace(plan)
    assert found.seconds == pytest.approx(7.0)
    stall = found.stalls[0]
    assert (stall.tensor, stall.time_s, stall.cause, stall.blocker) == ("w0", 5.0, LINK_BUSY, "a0")


def test_a_training_plan() -> None:
    # Six ops and one rerun take 14 s; a0 leaves during op1 and comes back in the 2 s before op3.
    found = trace(training())
    assert found.seconds == pytest.approx(16.0)
    assert [(s.op, s.recomputed) for s in found.ops] == [
        (0, False), (1, False), (2, False), (1, True), (3, False), (4, False), (5, False),
    ]  # fmt: skip
    assert [(t.kind, t.begun_s, t.arrived_s) for t in found.transfers] == [
        ("offload", 2.0, 4.0),
        ("reload", 6.0, 8.0),
    ]
    assert [(s.op, s.tensor, s.time_s, s.cause, s.blocker) for s in found.stalls] == [
        (3, "a0", 2.0, MEMORY, "a1")
    ]
    gpu = found.memory["gpu"]
    assert set(gpu.bytes_by_use["states"]) == {MB}
    activations = dict(zip(gpu.times_s, gpu.bytes_by_use["activations"], strict=True))
    # From 4 s a1 and a2 alone, from 6 s a2 and the room of a0, then a1 again and at last g1.
    assert activations[4.0] == 4 * MB
    assert activations[6.0] == 4 * MB
    assert activations[8.0] == 6 * MB
    assert activations[10.0] == 8 * MB
    assert gpu.peak_bytes == 9 * MB
    cpu = found.memory["cpu"]
    copies = dict(zip(cpu.times_s, cpu.total_bytes, strict=True))
    assert copies == {0.0: 0, 2.0: 2 * MB, 8.0: 0, 16.0: 0}


def test_an_op_on_another_tier_writes_there() -> None:
    plan = hand_plan(
        {"a0": 2, "y0": 1},
        [("", "a0", 1.0), ("a0", "y0", 1.0)],
        [Compute(op=0), fetch(1, "a0", 2, None), Wait(op=1, tensor="a0"), Compute(op=1)],
        sites={0: "cpu"},
        repeats=False,
    )
    found = trace(plan)
    assert [(s.site, s.begun_s, s.ended_s) for s in found.ops] == [
        ("cpu", 0.0, 4.0), ("gpu", 6.0, 7.0),
    ]  # fmt: skip
    assert found.memory["cpu"].peak_bytes == 2 * MB
    assert found.memory["gpu"].peak_bytes == 3 * MB


@pytest.mark.parametrize("plan", [streaming(), training()])
def test_hand_plans_keep_the_rules_and_hold_what_the_verifier_counts(plan: Plan) -> None:
    verify(plan)
    peaks = {tier: curve.peak_bytes for tier, curve in trace(plan).memory.items()}
    assert peaks == plan.peak_bytes


def test_another_machine_changes_the_links_only() -> None:
    found = trace(streaming(), machine(in_bandwidth=2 * MB, name="twice"))
    assert found.seconds == pytest.approx(5.0)
    assert found.machine == "twice"
    with pytest.raises(KeyError):
        trace(streaming(), replace(machine(), links=()))


def _seconds(found: Trace) -> float:
    """Return what ops and waits add up to: the iteration, for there is nothing else."""
    computed_s = sum(span.ended_s - span.begun_s for span in found.ops)
    return computed_s + sum(stall.time_s for stall in found.stalls)


def test_a_wait_at_the_end_counts() -> None:
    plan = hand_plan(
        {"s0": 3},
        [("s0", "s0", 1.0)],
        [
            fetch(0, "s0", 3, None),
            Wait(op=0, tensor="s0"),
            Compute(op=0),
            Offload(op=1, tensor="s0", link="gpu->cpu", size_bytes=3 * MB),
            Wait(op=1, tensor="s0"),
            Release(op=1, tensor="s0"),
        ],
        homes={"s0": "cpu"},
    )
    found = trace(plan)
    assert found.seconds == pytest.approx(7.0)
    assert [(s.op, s.time_s) for s in found.stalls] == [(0, 3.0), (1, 3.0)]
    slices = [e for e in perfetto(plan, found)["traceEvents"] if e.get("cat") == "stall"]
    assert [(e["ts"], e["dur"]) for e in slices] == [(0.0, 3e6), (4e6, 3e6)]


@settings(max_examples=15, deadline=None)
@given(task=workloads(), on=machines(), share=shares())
def test_it_agrees_with_the_replay_and_the_budget(
    task: Workload, on: Machine, share: float
) -> None:
    plan = make_plan(
        task, on, Budget.of(budget_at(share, task, on), on), fingerprint={}, time_limit_s=1.0
    )
    found, cheap = trace(plan), replay_plan(plan)
    assert found.seconds == cheap.seconds
    assert _seconds(found) == pytest.approx(cheap.seconds)
    site = on.compute_tier
    for tier, curve in found.memory.items():
        assert curve.peak_bytes <= plan.peak_bytes[tier]
    assert plan.peak_bytes[site] <= plan.budget_bytes[site]
    needed = [t for t in found.transfers if t.needed_s is not None]
    assert sum(t.size_bytes for t in needed) == sum(found.link_bytes.values())
    assert all(t.issued_s <= t.begun_s <= t.arrived_s for t in found.transfers)


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_memory_is_what_the_verifier_counts(case: Case) -> None:
    limits = case.limits_bytes
    budget = Budget(gpu=limits.get("gpu"), cpu=limits.get("cpu"), nvme=limits.get("nvme"))
    try:
        plan = make_plan(
            case.workload, case.machine, budget, fingerprint={}, time_limit_s=0.5, move_all=True
        )
    except InfeasiblePlanError:
        return
    found = trace(plan)
    for tier, curve in found.memory.items():
        if tier == case.machine.compute_tier and any(plan.arena_bytes.values()):
            assert curve.peak_bytes <= plan.peak_bytes[tier]
        else:
            assert curve.peak_bytes == plan.peak_bytes[tier]
    assert found.seconds == plan.certificate.predicted_s
    assert _seconds(found) == pytest.approx(found.seconds)
