"""Explanations of plans whose times a reader can add up: 1 GB/s, ops of 10 ms, weights of 10 MB."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine, MemoryRate, Place
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Release, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.bounds.certify import Proof, certify
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.explain import alternatives as alternatives_module
from gascompile.passes.explain.explain import OpExplanation, TensorExplanation, explain
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.plan.assemble import assemble
from gascompile.passes.plan.draft import draft_schedule
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import best_staging
from gascompile.passes.verify.walk import verify
from tests.cost_models.hand_plans import fetch, hand_plan
from tests.passes.planning import PAGE, budget_at, cpu_machine, shares, workloads

_MB = 10**6
_RESERVED = reserve_bytes(10 * _MB)


def _machine(bandwidth: float = 1e9) -> Machine:
    return Machine(
        name="toy",
        places=(Place.named("cpu", 1 << 40), Place.named("nvme", 1 << 40)),
        links=(Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=bandwidth),),
        memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=10e9, op_overhead_s=1e-5),),
    )


def _workload(num_weights: int = 4, op_s: float = 0.010, *, repeats: bool = True) -> Workload:
    tensors = [TensorSpec(name="%x", size_bytes=4096, kind=TensorKind.INPUT)]
    ops = []
    before = "%x"
    for i in range(num_weights):
        kind = TensorKind.OUTPUT if i == num_weights - 1 else TensorKind.ACTIVATION
        tensors.append(TensorSpec(name=f"w{i}", size_bytes=10 * _MB, kind=TensorKind.WEIGHT))
        tensors.append(TensorSpec(name=f"%op{i}", size_bytes=4096, kind=kind))
        ops.append(
            OpSpec(
                name=f"op{i}",
                time_s={"cpu": op_s},
                reads=(before, f"w{i}"),
                writes=(f"%op{i}",),
                flops=2 * 10 * _MB,
                read_bytes=10 * _MB,
                write_bytes=4096,
            )
        )
        before = f"%op{i}"
    return Workload(name="toy", repeats=repeats, tensors=tuple(tensors), ops=tuple(ops))


def _plan(workload: Workload, budget_bytes: int, machine: Machine | None = None) -> Plan:
    chosen = machine or _machine()
    return make_plan(workload, chosen, Budget(cpu=budget_bytes), fingerprint={}, time_limit_s=5.0)


def _tensor(plan: Plan, name: str) -> TensorExplanation:
    found = explain(plan, name)
    assert isinstance(found, TensorExplanation)
    return found


def _names(plan: Plan, *, resident: bool) -> list[str]:
    weights = [n for n, t in plan.tensors.items() if t.kind == TensorKind.WEIGHT]
    return [n for n in weights if (plan.tensors[n].home == "cpu") == resident]


def test_a_streamed_weight_names_its_moves_and_its_alternative() -> None:
    # Links ten times too slow: 4 weights take 400 ms, room for 2 of them is 2 residents less 1 to stage.
    plan = _plan(_workload(), 3 * _RESERVED + 8192 * 4, _machine(1e8))
    streamed = _names(plan, resident=False)
    assert streamed
    found = _tensor(plan, streamed[0])
    assert found.home == "nvme"
    assert found.size_bytes == 10 * _MB
    assert len(found.transfers) == 1
    transfer = found.transfers[0]
    assert transfer.arrived_s - transfer.begun_s == pytest.approx(0.1)
    assert transfer.link == "nvme->cpu"
    assert found.releases
    assert found.alternative is not None
    assert found.alternative.home == "cpu"
    assert found.alternative.arena_change_bytes == _RESERVED
    assert found.peer is not None
    assert found.peer.exchange is not None
    assert found.peer.exchange.arena_change_bytes == 0
    assert found.peer.exchange.seconds == pytest.approx(found.plan_s)
    assert "streamed from nvme" in found.reason


def test_stalls_and_slack_add_up_to_the_iteration() -> None:
    plan = _plan(_workload(), 3 * _RESERVED + 8192 * 4, _machine(1e8))
    stalls = sum(_tensor(plan, name).stall_s for name in _names(plan, resident=False))
    assert 0.04 + stalls == pytest.approx(plan.certificate.predicted_s)
    late = sum(max(0.0, -t.slack_s) for t in trace(plan).transfers)
    assert late == pytest.approx(stalls)


def test_streaming_a_resident_weight_has_its_price() -> None:
    plan = _plan(_workload(), 3 * _RESERVED + 8192 * 4, _machine(1e8))
    found = _tensor(plan, _names(plan, resident=True)[0])
    assert found.home == "cpu"
    assert found.transfers == ()
    assert found.alternative is not None
    assert found.alternative.home == "nvme"
    assert found.alternative.arena_change_bytes == -_RESERVED
    # Three transfers of 100 ms, and at most one op of 10 ms during which none can run.
    assert found.alternative.seconds is not None
    assert 0.3 - 1e-9 <= found.alternative.seconds <= 0.31 + 1e-9
    change_s = found.alternative.seconds - plan.certificate.predicted_s
    assert found.alternative.change_s == pytest.approx(change_s)
    assert "would cost" in found.reason


def test_a_weight_that_hides_behind_compute_saves_nothing() -> None:
    plan = _plan(_workload(op_s=0.050), 3 * _RESERVED + 8192 * 4)
    for name in _names(plan, resident=False):
        found = _tensor(plan, name)
        assert found.stall_s == 0.0
        assert all(t.slack_s >= 0 for t in found.transfers)
        assert found.alternative is not None
        assert found.alternative.change_s is None or found.alternative.change_s >= -1e-9


def test_a_weight_that_cannot_stay_says_what_it_takes() -> None:
    plan = _plan(_workload(), _RESERVED + 8192 * 2)
    found = _tensor(plan, "w1")
    assert found.alternative is not None
    assert found.alternative.seconds is None
    assert "does not leave" in found.reason
    assert found.peer is None


def test_everything_resident_without_iterations() -> None:
    plan = _plan(_workload(repeats=False), 1 << 30)
    found = _tensor(plan, "w0")
    assert found.home == "cpu"
    assert found.alternative is not None
    assert found.alternative.change_s is not None


def test_a_weight_in_tiles_is_explained_as_a_whole() -> None:
    there = 4 * _MB // 4096 * 4096
    plan = hand_plan(
        {"w0[0:3]": 3, "w0[3:4]": 1},
        [("w0[0:3]", "", 1.5), ("w0[3:4]", "", 0.5)],
        [
            Compute(op=0),
            fetch(1, "w0[3:4]", 1, there),
            Wait(op=1, tensor="w0[3:4]", address=there),
            Compute(op=1),
            Release(op=2, tensor="w0[3:4]", address=there),
        ],
        homes={"w0[3:4]": "cpu"},
        addresses={"w0[0:3]": 0},
    )
    found = _tensor(plan, "w0")
    assert (found.size_bytes, found.home, found.stall_s) == (4 * _MB, "gpu, cpu", 1.0)
    assert len(found.transfers) == 1
    assert "2 tiles" in found.reason
    assert _tensor(plan, "w0[3:4]").home == "cpu"


def test_tensors_without_a_choice() -> None:
    plan = _plan(_workload(), 1 << 30)
    assert "the caller's memory" in _tensor(plan, "%x").reason
    assert "lives in cpu from 'op0' until 'op1'" in _tensor(plan, "%op0").reason
    assert "handed to the caller" in _tensor(plan, "%op3").reason
    assert _tensor(plan, "%op0").alternative is None


def test_an_op_names_its_bound_and_its_operands() -> None:
    plan = _plan(_workload(), 3 * _RESERVED + 8192 * 4, _machine(1e8))
    found = explain(plan, "op1")
    assert isinstance(found, OpExplanation)
    assert found.site == "cpu"
    assert found.index == 1
    # 10 MB at 10 GB/s take 1 ms of the op's 10 ms.
    assert found.bound == "compute"
    assert found.arithmetic_intensity == pytest.approx(2.0, rel=1e-3)
    assert [operand.name for operand in found.reads] == ["%op0", "w1"]
    assert found.reads[1].home == plan.tensors["w1"].home
    stalls = [explain(plan, f"op{i}") for i in range(4)]
    total_s = sum(op.stall_s for op in stalls if isinstance(op, OpExplanation))
    assert total_s == pytest.approx(plan.certificate.predicted_s - 0.04)


@pytest.mark.parametrize(("op_s", "bound"), [(1e-3 + 1e-5, "memory"), (1.2e-5, "launch overhead")])
def test_bounds(op_s: float, bound: str) -> None:
    found = explain(_plan(_workload(op_s=op_s), 1 << 30), "op0")
    assert isinstance(found, OpExplanation)
    assert found.bound == bound


def test_an_unknown_name_suggests_near_ones() -> None:
    plan = _plan(_workload(), 1 << 30)
    with pytest.raises(ValueError, match=r"did you mean .*'w1'"):
        explain(plan, "w11")
    with pytest.raises(ValueError, match="see the plan"):
        explain(plan, "##########")


def test_a_plan_of_hundreds_of_weights_is_explained_without_a_search() -> None:
    workload = _workload(400)
    plan = make_plan(
        workload, _machine(1e8), Budget(cpu=100 * _RESERVED), fingerprint={}, strategy="first_fit"
    )
    begun_s = time.process_time()
    assert _tensor(plan, "w300").peer is not None
    assert time.process_time() - begun_s < 20.0


@settings(max_examples=8)
@given(workloads(max_weights=5, max_ops=6), shares())
def test_what_is_offered_fits_beside_what_is_reserved(task: Workload, share: float) -> None:
    """Each offered schedule becomes a plan that the verifier accepts within the same budget."""
    machine, reserved = cpu_machine(60e6, 1e-4), 7 * PAGE
    budget = Budget(cpu=budget_at(share, task, machine) + reserved)
    plan = make_plan(task, machine, budget, fingerprint={}, reserved_bytes=reserved)
    offered: list[tuple[Problem, Schedule]] = []

    def spy(asked: Problem, placement: Placement, arena_bytes: int) -> Schedule | None:
        found = best_staging(asked, placement, arena_bytes)
        if found is not None:
            offered.append((asked, found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternatives_module, "best_staging", spy)
        for name in [t.name for t in plan.workload.tensors if t.kind == TensorKind.WEIGHT]:
            explain(plan, name)
    for asked, schedule in offered:
        assert asked.reserved_bytes == plan.reserved_bytes == reserved
        draft = draft_schedule(asked, schedule)
        limit_s, binding = least_time(asked.workload, machine, asked.limits_bytes)
        proof = Proof(limit_s=limit_s, binding=binding, bound_s=0.0, timed_out=False)
        certificate = certify(draft.seconds, proof, solve_s=0.0, mip_gap=0.0)
        limits = asked.limits_bytes
        verify(
            assemble(draft, machine, limits, certificate, fingerprint={}, reserved_bytes=reserved)
        )
