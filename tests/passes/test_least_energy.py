"""Plans for the fewest joules: against all candidates by hand, and never more than the fastest plan takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gascompile import plan as plan_source
from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.reports import Energy
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.passes.search.strategies import NAMES
from gascompile.passes.verify.walk import verify
from tests.cost_models.test_energy import powered
from tests.integrations.test_placements import mixture
from tests.passes.test_sites import SIZE, machine
from tests.scale import SCALE

ROOM = Budget(gpu=5 * reserve_bytes(SIZE))


def planned(workload: Workload, on: Machine, objective: str, strategy: str | None = None) -> Plan:
    return plan_source(workload, ROOM, on, time_limit_s=2, objective=objective, strategy=strategy)


def joules(plan: Plan) -> float:
    found = plan_energy(plan)
    assert found is not None
    assert plan.energy == found
    return found.joules


def on_gpu(seconds: float = 1.0) -> Workload:
    ops = tuple(replace(op, time_s={"gpu": seconds}) for op in mixture().ops)
    return replace(mixture(), ops=ops)


@settings(max_examples=4 * SCALE, deadline=None)
@given(st.floats(0.05, 8.0), st.floats(0.0, 300.0), st.floats(1.0, 500.0), st.floats(0.0, 100.0))
def test_no_candidate_takes_less(
    link_s: float, gpu_idle_w: float, cpu_busy_w: float, cpu_idle_w: float
) -> None:
    on = powered(link_s, gpu=(300.0, gpu_idle_w), cpu=(max(cpu_busy_w, cpu_idle_w), cpu_idle_w))
    for workload in (on_gpu(), mixture()):
        found = planned(workload, on, "energy")
        verify(found)
        least = joules(found) * (1 - 1e-9)
        assert joules(planned(workload, on, "time")) >= least
        assert all(joules(planned(workload, on, "time", name)) >= least for name in NAMES)


def test_ops_go_where_they_take_less_though_that_is_slower() -> None:
    # Experts take 3 s on the host and 1 s on the GPU, whose second costs thirty times as much.
    hungry = powered(0.01, gpu=(3000.0, 0.0), cpu=(20.0, 20.0))
    quick, thrifty = (planned(mixture(), hungry, objective) for objective in ("time", "energy"))
    assert joules(thrifty) <= joules(quick)
    assert thrifty.certificate.predicted_s >= quick.certificate.predicted_s * (1 - 1e-9)


def test_a_machine_that_does_not_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give it 'energy'.*or plan for time"):
        planned(on_gpu(), machine(0.5), "energy")
    with pytest.raises(ValueError, match="objective is one of time, energy, not 'speed'"):
        plan_source(on_gpu(), ROOM, powered(), objective="speed")


def test_claims_are_checked_and_written() -> None:
    plan = planned(on_gpu(), powered(), "energy")
    again = serial.from_json(Plan, json.loads(serial.dumps(plan)))
    assert again == plan
    assert json.loads(serial.dumps(plan))["energy"] == {"joules": joules(plan), "source": "model"}
    false = Energy(joules=joules(plan) / 2, source="model")
    with pytest.raises(PlanVerificationError, match=r"claims .* joules"):
        verify(replace(plan, energy=false))
    # Files of before claim none.
    verify(replace(plan, energy=None))


def test_the_verb_takes_it(tmp_path: Path) -> None:
    files = {"workload": tmp_path / "w.workload.json", "machine": tmp_path / "m.json"}
    files["workload"].write_text(serial.dumps(on_gpu()))
    files["machine"].write_text(serial.dumps(powered()))
    asked = ["plan", str(files["workload"]), "--machine", str(files["machine"]), "--json"]
    asked += ["--budget", f"{5 * reserve_bytes(SIZE)}"]
    found = CliRunner().invoke(app, [*asked, "--objective", "energy"])
    assert found.exit_code == 0, found.output
    plan = serial.from_json(Plan, json.loads(found.stdout))
    assert joules(plan) == joules(planned(on_gpu(), powered(), "energy"))
    assert CliRunner().invoke(app, [*asked, "--objective", "speed"]).exit_code == 2
