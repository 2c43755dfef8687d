"""No plan, by anyone, below a bound that claims to hold for it.

``GASCOMPILE_BOUND_RUNS`` sets the number of random problems, ``GASCOMPILE_BOUND_MODELS`` that of captured models.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from gascompile.capture.export import capture
from gascompile.core.budget import Budget
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import SolverStatus
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.integrations.huggingface import register_pytrees
from gascompile.passes.bounds.certify import EVERYTHING, WEIGHTS, Proof, certify
from gascompile.passes.graph.annotate import annotate
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.plan.make_plan import make_plan
from tests.passes.bound_claims import draw_problem, outcome
from tests.passes.planning import PAGE, UNIT, cpu_machine, weight
from tests.zoo import CASES, make

RUNS = int(os.environ.get("GASCOMPILE_BOUND_RUNS", "10"))
MODELS = int(os.environ.get("GASCOMPILE_BOUND_MODELS", "1"))
PEERS = ("first_fit", "per_layer")


@pytest.mark.parametrize("seed", range(RUNS))
def test_no_plan_of_a_random_problem_is_below_a_bound(seed: int) -> None:
    case = draw_problem(seed)
    found = outcome(case.workload, case.machine, case.limits_bytes, time_limit_s=1.0)
    assert not found.violations


@pytest.mark.parametrize("seed", range(MODELS))
def test_no_plan_of_a_captured_model_is_below_a_bound(seed: int) -> None:
    chance = random.Random(seed)
    register_pytrees()
    model, inputs = make(list(CASES)[(seed + 8) % len(CASES)])
    machine = preset("h100-gen5" if seed % 2 else "cpu-nvme")
    workload = annotate(capture(model, (), inputs).program, machine).workload
    machine = _balanced(machine, workload, chance)
    site = machine.compute_tier
    least = _least_bytes(workload, machine)
    weights = sum(t.size_bytes for t in workload.tensors if t.kind == TensorKind.WEIGHT)
    limits = {tier: spec.size_bytes for tier, spec in machine.tiers.items()}
    limits[site] = least + int(chance.random() * weights)
    found = outcome(workload, machine, limits, time_limit_s=2.0, max_labels=0, strategies=PEERS)
    assert len(found.known) > len(PEERS)
    assert not found.violations


def _balanced(machine: Machine, workload: Workload, chance: random.Random) -> Machine:
    """Return the machine with links on which all weights take about as long as the ops, without latency."""
    compute_s = sum(op.time_s[machine.compute_tier] for op in workload.ops)
    total = sum(t.size_bytes for t in workload.tensors if t.kind == TensorKind.WEIGHT)
    rate = total / compute_s * chance.choice((0.3, 1.0, 3.0))
    fastest = max(link.bandwidth_bytes_per_s for link in machine.links)
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / fastest * rate,
            latency_s=0.0,
            shared=(),
        )
        for link in machine.links
    )
    return replace(machine, links=links, pipes=(), memory=machine.memory)


def _least_bytes(workload: Workload, machine: Machine) -> int:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(workload, machine, Budget.of(0, machine), fingerprint={})
    return caught.value.required_bytes


def _around() -> Workload:
    """Return ops of which the first and the last read one weight, the others one each between two uses."""
    return Workload(
        name="around",
        repeats=True,
        tensors=tuple(weight(name) for name in "abc"),
        ops=tuple(
            OpSpec(name=f"op{i}", time_s={"cpu": 1e-3}, reads=(name,))
            for i, name in enumerate("abca")
        ),
    )


def test_a_weight_kept_around_the_end_alone_is_within_the_bound_of_everything() -> None:
    """There is room for one: streams load four, of which moving all keeps one from the last op to the first."""
    task, machine = _around(), cpu_machine()
    budget = UNIT + 2 * PAGE
    streams = make_plan(task, machine, Budget(cpu=budget), fingerprint={}, mip_gap=0.0).certificate
    free = plan_intervals(
        task, machine, {"cpu": budget}, effort=Effort(time_limit_s=5.0, mip_gap=0.0)
    ).seconds
    assert streams.lower_bound_all_s <= free * (1 + 1e-9)
    assert streams.holds_over == WEIGHTS
    assert streams.lower_bound_s == pytest.approx(4.0, rel=0.01)
    assert free == pytest.approx(3.0, rel=0.01)


def test_activations_that_may_leave_lower_the_bound_of_everything_alone() -> None:
    """Two units of an activation lie idle while four weights stream: moved out once, they make room."""
    idle = TensorSpec(name="%x", size_bytes=4 * UNIT, kind=TensorKind.ACTIVATION)
    ops = [OpSpec(name="make", time_s={"cpu": 0.1}, writes=("%x",))]
    ops += [OpSpec(name=f"op{n}", time_s={"cpu": 1.0}, reads=(n,)) for n in "abcd"]
    ops += [OpSpec(name="use", time_s={"cpu": 0.1}, reads=("%x",))]
    task = Workload(
        name="idle", repeats=True, tensors=(idle, *(weight(n) for n in "abcd")), ops=tuple(ops)
    )
    machine = cpu_machine(UNIT / 4)
    back = replace(machine.links[0], source_tier="cpu", target_tier="nvme")
    machine = replace(machine, links=(*machine.links, replace(back, bandwidth_bytes_per_s=1e12)))
    found = make_plan(task, machine, Budget(cpu=6 * UNIT), fingerprint={}).certificate
    everything = make_plan(
        task, machine, Budget(cpu=6 * UNIT), fingerprint={}, move_all=True, time_limit_s=3.0
    ).certificate
    assert found.holds_over == WEIGHTS
    assert found.lower_bound_all_s <= everything.predicted_s < found.lower_bound_s


def test_a_bound_that_a_plan_beats_is_dropped() -> None:
    wrong = Proof(limit_s=1.0, binding="compute", bound_s=3.0, all_s=2.5, timed_out=False)
    kept = wrong.without_what_fails(2.7)
    assert (kept.limit_s, kept.all_s, kept.bound_s) == (1.0, 2.5, 0.0)
    found = certify(2.7, kept, solve_s=0.0, mip_gap=0.01)
    assert (found.lower_bound_s, found.holds_over) == (2.5, EVERYTHING)


def test_the_certificate_prefers_what_holds_over_everything() -> None:
    proof = Proof(limit_s=1.0, binding="compute", bound_s=2.0, all_s=1.99, timed_out=False)
    close = certify(2.0, proof, solve_s=0.0, mip_gap=0.01)
    assert (close.lower_bound_s, close.holds_over) == (1.99, EVERYTHING)
    assert close.status is SolverStatus.OPTIMAL
    exact = certify(2.0, proof, solve_s=0.0, mip_gap=0.0)
    assert (exact.lower_bound_s, exact.holds_over) == (2.0, WEIGHTS)
    assert exact.lower_bound_all_s == 1.99
