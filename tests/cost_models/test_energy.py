"""Energy of plans: the sum by hand, what it does when constants change, and nothing where one is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.machine import check_machine
from gascompile.core.checks.machine_files import preset, preset_names
from gascompile.core.errors import FormatError
from gascompile.core.machine import EnergyModel, LinkEnergy, Machine, Power
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.integrations.llama_cpp import LlamaCppPlacement, llama_cpp_plan
from gascompile.passes.plan.make_plan import make_plan
from tests.integrations.test_placements import mixture
from tests.passes.test_sites import SIZE, machine

PER_BYTE = {"cpu->gpu": 2e-6, "gpu->cpu": 3e-6}


def powered(
    link_s: float = 0.5,
    *,
    gpu: tuple[float, float] = (300, 40),
    cpu: tuple[float, float] = (100, 20),
) -> Machine:
    """Return a machine of two processors, each with its watts busy and idle."""
    energy = EnergyModel(
        processors=(
            Power(device="gpu", busy_w=gpu[0], idle_w=gpu[1]),
            Power(device="cpu", busy_w=cpu[0], idle_w=cpu[1]),
        ),
        links=tuple(LinkEnergy(link=n, joules_per_byte=x) for n, x in PER_BYTE.items()),
    )
    return replace(machine(link_s), energy=energy)


def streamed(on: Machine) -> Plan:
    """Return the plan of nine ops of a second each on the GPU, with room for five of their weights."""
    budget = Budget(gpu=5 * reserve_bytes(SIZE))
    ops = tuple(replace(op, time_s={"gpu": 1.0}) for op in mixture().ops)
    return make_plan(replace(mixture(), ops=ops), on, budget, fingerprint={}, time_limit_s=2)


def joules(plan: Plan) -> float:
    found = plan_energy(plan)
    assert found is not None
    assert found.source == "model"
    return found.joules


def moved_joules(plan: Plan) -> float:
    return sum(PER_BYTE[name] * size_bytes for name, size_bytes in plan.link_bytes.items())


def test_the_sum_by_hand() -> None:
    plan = streamed(powered())
    whole_s = plan.certificate.predicted_s
    assert whole_s == pytest.approx(9, rel=1e-3)
    assert plan.link_bytes["cpu->gpu"] >= 4 * SIZE
    by_hand = 300 * 9 + 40 * (whole_s - 9) + 20 * whole_s + moved_joules(plan)
    assert joules(plan) == pytest.approx(by_hand)
    # A slow link makes the GPU wait, and what waits draws less.
    slow = streamed(powered(8.0))
    assert slow.certificate.predicted_s > 20
    rest_s = slow.certificate.predicted_s - 9
    by_hand = 300 * 9 + 40 * rest_s + 20 * (9 + rest_s) + moved_joules(slow)
    assert joules(slow) == pytest.approx(by_hand)


def test_each_processor_counts_the_ops_that_it_runs() -> None:
    plan = llama_cpp_plan(LlamaCppPlacement.of(99, [r"\.experts\.=CPU"]), mixture(), powered())
    whole_s = plan.certificate.predicted_s
    assert whole_s == pytest.approx(6 * 1 + 3 * 3, rel=1e-3)
    by_hand = 300 * 6 + 40 * (whole_s - 6) + 100 * 9 + 20 * (whole_s - 9) + moved_joules(plan)
    assert joules(plan) == pytest.approx(by_hand)


def test_it_grows_with_each_constant_and_is_linear_in_all() -> None:
    plan = streamed(powered(8.0))
    before = joules(plan)
    for gpu, cpu in (((301, 40), (100, 20)), ((300, 41), (100, 20)), ((300, 40), (100, 21))):
        assert joules(replace(plan, machine=powered(8.0, gpu=gpu, cpu=cpu))) > before
    model = plan.machine.energy
    assert model is not None
    twice = EnergyModel(
        processors=tuple(
            replace(p, busy_w=2 * p.busy_w, idle_w=2 * p.idle_w) for p in model.processors
        ),
        links=tuple(replace(x, joules_per_byte=2 * x.joules_per_byte) for x in model.links),
    )
    assert joules(replace(plan, machine=replace(plan.machine, energy=twice))) == pytest.approx(
        2 * before
    )


def test_without_a_constant_there_is_none() -> None:
    plan = streamed(powered())
    model = plan.machine.energy
    assert model is not None

    def with_energy(energy: EnergyModel | None) -> Plan:
        return replace(plan, machine=replace(plan.machine, energy=energy))

    assert plan_energy(with_energy(None)) is None
    for lost in range(2):
        left = tuple(p for i, p in enumerate(model.processors) if i != lost)
        assert plan_energy(with_energy(replace(model, processors=left))) is None
    assert plan_energy(with_energy(replace(model, links=model.links[1:]))) is None
    # Nothing moves over the other one, which may even be gone.
    check_machine(replace(plan.machine, links=plan.machine.links[:1]))
    assert plan.link_bytes.get("gpu->cpu", 0) == 0
    assert plan_energy(with_energy(replace(model, links=model.links[:1]))) is not None


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_all_or_nothing(name: str) -> None:
    found = preset(name)
    if name == "emulated":
        assert found.energy is None
        return
    assert found.energy is not None
    assert {p.device for p in found.energy.processors} == set(found.tiers) - {"nvme"}
    assert {x.link for x in found.energy.links} == {link.name for link in found.links}


def test_machines_without_it_are_written_as_before() -> None:
    plain = machine(0.5)
    assert "energy" not in json.loads(serial.dumps(plain))
    found = serial.from_json(Machine, json.loads(serial.dumps(powered())))
    assert found == powered()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"processors": (Power(device="tpu", busy_w=1, idle_w=1),)},
            r"processors\[0\].*no place 'tpu'",
        ),
        ({"processors": (Power(device="gpu", busy_w=1, idle_w=2),)}, "2 watts idle and 1 busy"),
        ({"processors": (Power(device="gpu", busy_w=1, idle_w=-1),)}, "0 <= idle"),
        ({"processors": (Power(device="gpu", busy_w=1e9, idle_w=1),)}, "watts"),
        ({"processors": 2 * (Power(device="gpu", busy_w=2, idle_w=1),)}, "twice"),
        (
            {"links": 2 * (LinkEnergy(link="gpu->cpu", joules_per_byte=1e-9),)},
            r"links\[1\].*twice",
        ),
        ({"links": (LinkEnergy(link="gpu->cpu", joules_per_byte=-1e-9),)}, "joules_per_byte"),
    ],
)
def test_constants_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    model = powered().energy
    assert model is not None
    with pytest.raises(FormatError, match=message):
        check_machine(replace(powered(), energy=replace(model, **change)))  # type: ignore[arg-type]


def test_verbs_show_it_where_it_is_known(tmp_path: Path) -> None:
    for name, on in (("plain", machine(0.5)), ("powered", powered())):
        path = tmp_path / f"{name}.json"
        plan = streamed(on)
        plan.save(path)
        found = CliRunner().invoke(app, ["explain", str(path), "op0", "--json"])
        assert found.exit_code == 0, found.output
        data = json.loads(found.stdout)
        shown = CliRunner().invoke(app, ["explain", str(path), "op0"]).output
        if name == "plain":
            assert "energy" not in data
            assert "energy" not in shown
        else:
            assert data["energy"] == {"joules": joules(plan), "source": "model"}
            assert "by a model, not measured" in shown
