"""Assemble: a draft and its certificate as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gascompile.core.machine import Machine
from gascompile.core.plan import Certificate, OpPlan, Plan, accounts
from gascompile.core.sizes import format_size
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.passes.bounds.certify import Proof, certify
from gascompile.passes.plan.draft import Draft
from gascompile.passes.verify.account import account


def assemble(
    draft: Draft,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    certificate: Certificate,
    *,
    fingerprint: Mapping[str, str],
    warnings: tuple[str, ...] = (),
    reserved_bytes: int = 0,
) -> Plan:
    """Return the plan, with what its steps take and move.

    Raises:
        PlanVerificationError: the draft breaks a rule of the heap.
    """
    plan = Plan(
        fingerprint=dict(fingerprint),
        strategy=draft.strategy,
        places=accounts(
            budget_bytes=limits_bytes,
            arena_bytes={machine.compute_tier: draft.arena_bytes, **draft.middle_bytes},
            reserved_bytes={machine.compute_tier: reserved_bytes},
        ),
        links=(),
        tensors=draft.tensors,
        ops=tuple(
            OpPlan(name=op.name, site=site, time_s=op.time_s[site])
            for op, site in zip(draft.workload.ops, draft.op_sites, strict=True)
        ),
        steps=draft.steps,
        certificate=certificate,
        workload=draft.workload,
        machine=machine,
        warnings=warnings,
    )
    peak_bytes, link_bytes = account(plan)
    plan = plan.with_accounts(peak_bytes=peak_bytes, link_bytes=link_bytes)
    beyond = _beyond(machine, peak_bytes)
    return replace(plan, energy=plan_energy(plan), warnings=(*plan.warnings, *beyond))


def keeps_budget(
    draft: Draft, machine: Machine, limits_bytes: Mapping[str, int], *, reserved_bytes: int
) -> bool:
    """Return whether what a draft takes on all tiers is within their limits.

    Raises:
        PlanVerificationError: the draft breaks a rule of the heap.
    """
    none = Proof(limit_s=0.0, binding="compute", bound_s=0.0, timed_out=False)
    certificate = certify(draft.seconds, none, solve_s=0.0, mip_gap=0.0)
    plan = assemble(draft, machine, limits_bytes, certificate, fingerprint={})
    left_bytes = dict(limits_bytes)
    left_bytes[machine.compute_tier] = left_bytes.get(machine.compute_tier, 0) - reserved_bytes
    return all(size <= left_bytes.get(tier, 0) for tier, size in plan.peak_bytes.items())


def _beyond(machine: Machine, peak_bytes: Mapping[str, int]) -> tuple[str, ...]:
    """Return in words which places are smaller than the plan needs them, as budgets may be larger than they are."""
    return tuple(
        f"the plan takes {format_size(peak_bytes[place.name])} of '{place.name}', of which machine '{machine.name}' "
        f"has {format_size(place.size_bytes)}: it is for a larger one; give a budget that is there"
        for place in machine.places
        if peak_bytes.get(place.name, 0) > place.size_bytes
    )
