"""What a place is called means nothing: a plan for places of other names is the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import gascompile
from gascompile import Plan
from gascompile.core import serial
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import GASCompileError
from gascompile.core.machine import EnergyModel, Machine
from gascompile.core.workload import Workload
from gascompile.passes.verify.walk import verify
from tests.passes.random_workloads import Case, cases

NAMES = {"gpu": "r0.gpu", "cpu": "h0.cpu", "nvme": "h0.nvme3"}


def renamed(machine: Machine) -> Machine:
    """Return the machine with other names of its places, in all that names them."""
    return replace(
        machine,
        places=tuple(replace(p, name=NAMES[p.name]) for p in machine.places),
        links=tuple(
            replace(x, source_tier=NAMES[x.source_tier], target_tier=NAMES[x.target_tier])
            for x in machine.links
        ),
        rates=tuple(replace(rate, device=NAMES[rate.device]) for rate in machine.rates),
        memory=tuple(replace(rate, device=NAMES[rate.device]) for rate in machine.memory),
        energy=None if machine.energy is None else renamed_energy(machine.energy),
    )


def renamed_energy(energy: EnergyModel) -> EnergyModel:
    def link(name: str) -> str:
        return "->".join(NAMES[end] for end in name.split("->"))

    return EnergyModel(
        processors=tuple(replace(p, device=NAMES[p.device]) for p in energy.processors),
        links=tuple(replace(x, link=link(x.link)) for x in energy.links),
    )


def plain(plan: Plan, names: Mapping[str, str]) -> str:
    """Return a plan's JSON with the old names again, without what depends on the clock or is a digest."""
    certificate = replace(plan.certificate, solve_s=0.0)
    text = serial.dumps(replace(plan, certificate=certificate, fingerprint={}))
    for old, new in names.items():
        text = text.replace(new, old)
    return text


def planned(machine: Machine, workload: Workload, limits: Mapping[str, int]) -> str:
    try:
        plan = gascompile.plan(workload, gascompile.Budget(limits), machine, time_limit_s=60)
    except GASCompileError as error:
        return type(error).__name__
    verify(plan)
    return plain(plan, NAMES)


@settings(max_examples=12, deadline=None)
@given(cases(max_tensors=5, max_ops=5))
def test_workloads_have_the_same_plan(case: Case) -> None:
    case = case.scaled(4096)
    ops = tuple(
        replace(op, time_s={NAMES[site]: s for site, s in op.time_s.items()})
        for op in case.workload.ops
    )
    other = replace(case.workload, ops=ops)
    limits = {NAMES[name]: size for name, size in case.limits_bytes.items()}
    expected = planned(case.machine, case.workload, case.limits_bytes)
    assert planned(renamed(case.machine), other, limits) == expected


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"sites": "all"}], ids=str)
def test_models_have_the_same_plan(options: dict[str, Any]) -> None:
    """Times of packed weights and of ops on the host depend on what a place is, not on its name."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    machine = preset("h100-gen5")
    made = [
        gascompile.plan(net, "600KiB", on, example_inputs=(torch.zeros(4, 256),), **options)
        for on in (machine, renamed(machine))
    ]
    first, second = (plain(plan, NAMES) for plan in made)
    assert first == second
