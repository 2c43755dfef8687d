"""Ops that slow transfers down: seconds by hand, plans that know it, a trace in the machine's own time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.machine import Interference, InterferencePoint, Link, Machine, Place
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Prefetch, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.formulas.interference import lost_share
from gascompile.cost_models.simulate.replay import replay, replay_plan
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify

SIZE = 400_000
ROOM = reserve_bytes(SIZE)


def machine(lost_share: float, transfer_s: float = 4.0) -> Machine:
    return Machine(
        name="slow readers",
        places=(Place.named("cpu", 1 << 30), Place.named("nvme", 1 << 30)),
        links=(
            Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=SIZE / transfer_s),
        ),
        interference=Interference(
            points=(InterferencePoint(flops_per_byte=0.0, lost_share=lost_share),),
            source="assumed: by hand",
        ),
    )


def chain(times_s: list[float]) -> Workload:
    return Workload(
        name="chain",
        repeats=True,
        tensors=tuple(
            TensorSpec(name=f"w{i}", size_bytes=SIZE, kind=TensorKind.WEIGHT)
            for i in range(len(times_s))
        ),
        ops=tuple(
            OpSpec(name=f"op{i}", time_s={"cpu": time_s}, reads=(f"w{i}",))
            for i, time_s in enumerate(times_s)
        ),
    )


@pytest.mark.parametrize(
    ("op_s", "lost_share", "expected_s"),
    [
        # The transfer of 4 s starts with the op and goes on alone.
        (2.0, 0.0, 4.0),
        # Beside an op of 2 s it does half: 3 s are left.
        (2.0, 0.5, 5.0),
        # An op of 8 s at half speed is long enough.
        (8.0, 0.5, 8.0),
        # One of 6 s is not: 1 s is left.
        (6.0, 0.5, 7.0),
    ],
)
def test_a_transfer_beside_an_op_by_hand(op_s: float, lost_share: float, expected_s: float) -> None:
    steps: list[Step] = [
        Prefetch(op=0, tensor="w", link="nvme->cpu", size_bytes=SIZE, address=0),
        Compute(op=0),
        Wait(op=1, tensor="w", address=0),
    ]
    ops = [OpSpec(name="a", time_s={"cpu": op_s})]
    found = replay(steps, ops, [op_s], machine(lost_share), repeats=False)
    assert found.seconds == pytest.approx(expected_s)
    assert sum(stall.time_s for stall in found.stalls) == pytest.approx(expected_s - op_s)


@settings(max_examples=40, deadline=None)
@given(
    times_s=st.lists(st.sampled_from([0.0, 0.5, 1.0, 6.0]), min_size=1, max_size=6),
    lost_share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    num_more=st.integers(0, 3),
)
def test_plans_are_made_and_checked_in_the_machines_time(
    times_s: list[float], lost_share: float, num_more: int
) -> None:
    plan = make_plan(
        chain(times_s), machine(lost_share), Budget(cpu=(1 + num_more) * ROOM), fingerprint={}
    )
    verify(plan)
    found = plan.certificate
    assert found.lower_bound_s <= found.predicted_s * (1 + 1e-9)
    # The links need the bytes' time, and lose a share of that of the ops.
    moved_s = 4.0 * plan.link_bytes["nvme->cpu"] / SIZE
    least_s = max(sum(times_s), moved_s + lost_share * sum(times_s))
    assert found.predicted_s >= least_s * (1 - 1e-9)
    calm = replay_plan(plan, machine(0.0)).seconds
    assert calm <= found.predicted_s * (1 + 1e-9) <= calm + lost_share * sum(times_s) + 1e-6


def test_the_trace_is_in_the_machines_time() -> None:
    plan = make_plan(chain([2.0, 2.0, 2.0]), machine(0.5), Budget(cpu=2 * ROOM), fingerprint={})
    found = trace(plan)
    assert found.seconds == pytest.approx(plan.certificate.predicted_s)
    assert [op.ended_s - op.begun_s for op in found.ops] == pytest.approx([2.0] * 3)
    assert found.ops[-1].ended_s <= found.seconds * (1 + 1e-9)
    stalls_s = sum(stall.time_s for stall in found.stalls)
    assert sum(op.ended_s - op.begun_s for op in found.ops) + stalls_s == pytest.approx(
        found.seconds
    )
    # One that runs beside an op takes longer than its four seconds, none takes less.
    lengths_s = [t.arrived_s - t.begun_s for t in found.transfers]
    assert min(lengths_s) >= 4.0 * (1 - 1e-9)
    assert max(lengths_s) > 4.0


FULL = Interference(points=(InterferencePoint(flops_per_byte=0.0, lost_share=1.0),))


@pytest.mark.parametrize(
    ("flops", "expected"), [(0, 0.1), (100, 0.1), (200, 0.3), (300, 0.5), (9000, 0.5)]
)
def test_the_share_grows_with_the_intensity(flops: int, expected: float) -> None:
    points = tuple(
        InterferencePoint(flops_per_byte=at, lost_share=share)
        for at, share in ((30, 0.5), (10, 0.1))
    )
    target = replace(machine(0.0), interference=Interference(points=points))
    op = OpSpec(name="op", time_s={"cpu": 1.0}, flops=flops, read_bytes=6, write_bytes=4)
    assert lost_share(op, target) == pytest.approx(expected)


def test_a_share_of_all_is_refused() -> None:
    from gascompile.api.plan import plan
    from gascompile.core.errors import FormatError

    with pytest.raises(FormatError, match="interference"):
        plan(chain([1.0]), "1MiB", replace(machine(0.0), interference=FULL))


def moving(op_s_per_byte: float, lost_share: float = 0.0, transfer_s: float = 4.0) -> Machine:
    found = machine(lost_share, transfer_s)
    return replace(found, interference=replace(found.interference, op_s_per_byte=op_s_per_byte))


@pytest.mark.parametrize(
    ("op_s", "moving_s", "expected_s"),
    [
        # The op waits for the transfer anyway: the processor has 2 s to spare for moving.
        (2.0, 1.0, 4.0),
        (2.0, 3.0, 5.0),
        # Without time to spare all of it is lost.
        (8.0, 1.0, 9.0),
    ],
)
def test_moving_takes_the_processors_time(op_s: float, moving_s: float, expected_s: float) -> None:
    steps: list[Step] = [
        Prefetch(op=0, tensor="w", link="nvme->cpu", size_bytes=SIZE, address=0),
        Compute(op=0),
        Wait(op=1, tensor="w", address=0),
    ]
    ops = [OpSpec(name="a", time_s={"cpu": op_s})]
    found = replay(steps, ops, [op_s], moving(moving_s / SIZE), repeats=False)
    assert found.seconds == pytest.approx(expected_s)


@settings(max_examples=40, deadline=None)
@given(
    times_s=st.lists(st.sampled_from([0.5, 1.0, 6.0]), min_size=1, max_size=6),
    lost_share=st.sampled_from([0.0, 0.5]),
    moving_s=st.sampled_from([0.5, 2.0, 9.0]),
    num_more=st.integers(0, 3),
)
def test_plans_promise_no_less_than_computing_and_moving(
    times_s: list[float], lost_share: float, moving_s: float, num_more: int
) -> None:
    target = moving(moving_s / SIZE, lost_share)
    plan = make_plan(chain(times_s), target, Budget(cpu=(1 + num_more) * ROOM), fingerprint={})
    verify(plan)
    found = plan.certificate
    moved = plan.link_bytes["nvme->cpu"] / SIZE
    assert found.predicted_s >= (sum(times_s) + moving_s * moved) * (1 - 1e-9)
    assert found.limit_s <= found.lower_bound_s * (1 + 1e-9) <= found.predicted_s * (1 + 2e-9)
    assert replay_plan(plan).seconds == pytest.approx(found.predicted_s)
    spans = trace(plan)
    assert spans.seconds == pytest.approx(found.predicted_s)
    stalls_s = sum(stall.time_s for stall in spans.stalls)
    assert sum(op.ended_s - op.begun_s for op in spans.ops) <= found.predicted_s * (1 + 1e-9)
    assert stalls_s <= found.predicted_s


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_moving_costs_that_make_no_sense_are_refused(value: float) -> None:
    from gascompile.api.plan import plan
    from gascompile.core.errors import FormatError

    with pytest.raises(FormatError, match="op_s_per_byte"):
        plan(chain([1.0]), "1MiB", moving(value))
