"""Recost: a plan on a machine whose links turned out slower than those it was made for."""

from __future__ import annotations

from dataclasses import replace

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.passes.bounds.certify import Proof, certify
from gascompile.passes.bounds.least_time import least_time


def recost(plan: Plan, machine: Machine, *, warning: str) -> Plan:
    """Return ``plan`` with the time that its steps take on ``machine``, and what is proven about it there.

    What no plan could beat with faster links no plan beats with slower ones: the bound stays one.

    Args:
        plan: a verified plan.
        machine: the plan's own, no link of which is faster than it was.
        warning: why; becomes one of the plan's.

    Raises:
        ValueError: a link is missing or faster.
    """
    for link in plan.machine.links:
        now = next((other for other in machine.links if other.name == link.name), None)
        if now is None or now.transfer_time_s(1 << 20) < link.transfer_time_s(1 << 20):
            raise ValueError(f"the link {link.name} is not there or faster than it was: plan again")
    limit_s, binding = least_time(plan.workload, machine, plan.budget_bytes)
    before = plan.certificate
    proof = Proof(
        limit_s=limit_s,
        binding=binding,
        bound_s=before.lower_bound_s,
        all_s=before.lower_bound_all_s,
        timed_out=False,
    )
    certificate = certify(
        replay_plan(plan, machine).seconds,
        proof,
        solve_s=before.solve_s,
        # What was the best order of moves for other links need not be it for these.
        mip_gap=0.0,
        solver=before.solver,
    )
    again = replace(
        plan, machine=machine, certificate=certificate, warnings=(*plan.warnings, warning)
    )
    return replace(again, energy=plan_energy(again))
