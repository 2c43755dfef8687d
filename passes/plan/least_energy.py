"""Least energy: of the plans that each strategy makes, the one whose iteration takes the fewest joules.

Joules are those of the machine's model: watts while ops run and while processors wait, and what each moved byte takes.
The fastest plan seldom takes more than others; where ops bind, plans that are as fast move different bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.bounds.site_limit import has_sites
from gascompile.passes.search.strategies import NAMES

Make = Callable[[Workload, str | None], Plan]
"""Makes the fastest plan of a workload, or that of one strategy alone."""


def least_energy(make: Make, workload: Workload, machine: Machine, *, is_free: bool = True) -> Plan:
    """Return the plan of the fewest joules among the fastest one and those of all strategies.

    Where ops may run at other sites, the fastest plan without that is one of them, too. Of plans that take the same,
    the fastest one.

    Args:
        make: raises ``InfeasiblePlanError`` where there is no such plan.
        workload: what is planned.
        machine: what for.
        is_free: which weights stay is for the plan to say; it is not where an arena is shared with another plan.

    Raises:
        InfeasiblePlanError: not even the first one is there.
        ValueError: the machine lacks a constant that joules need.
    """
    plans = [make(workload, None)]
    asked: list[tuple[Workload, str | None]] = []
    if is_free and not writes_weights(workload):
        asked += [(workload, name) for name in NAMES]
    if has_sites(workload.ops, machine):
        asked.insert(0, (_at_one_site(workload, machine.compute_tier), None))
    for of, strategy in asked:
        try:
            plans.append(make(of, strategy))
        except InfeasiblePlanError:
            continue
    if any(plan.energy is None for plan in plans):
        raise ValueError(no_model(machine))
    return min(plans, key=lambda plan: (_joules(plan), plan.certificate.predicted_s))


def no_model(machine: Machine) -> str:
    """Return what to say where ``machine`` lacks constants of the model."""
    return (
        f"the machine '{machine.name}' does not say what its processors and links take, so no plan is known to take "
        "the least energy: give it 'energy' (docs/machines.md), or plan for time"
    )


def writes_weights(workload: Workload) -> bool:
    """Return whether an op changes a weight, which no plan of weights that only stream allows."""
    weights = {t.name for t in workload.tensors if t.kind == TensorKind.WEIGHT}
    return any(not weights.isdisjoint(op.writes) for op in workload.ops)


def _joules(plan: Plan) -> float:
    assert plan.energy is not None, "each candidate has its joules"
    return plan.energy.joules


def _at_one_site(workload: Workload, site: str) -> Workload:
    ops = (
        replace(op, time_s={site: op.time_s[site]}) if site in op.time_s else op
        for op in workload.ops
    )
    return replace(workload, ops=tuple(ops))
