"""Make a plan: from a workload, a machine and a budget to steps with addresses and a certificate."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gascompile.ir import Budget, Machine, Plan, Workload
from gascompile.passes.assemble import assemble
from gascompile.passes.certify import certify
from gascompile.passes.feasible import feasible
from gascompile.passes.pin import pin, pinned_residents
from gascompile.passes.problem import Problem, problem
from gascompile.passes.prove import prove
from gascompile.passes.refine import refine
from gascompile.passes.schedule import Schedule
from gascompile.passes.search import best_staging, search
from gascompile.passes.strategies import NAMES, family, homes, strategies
from gascompile.passes.verify import verify


def make_plan(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    *,
    fingerprint: Mapping[str, str],
    time_limit_s: float = 20.0,
    mip_gap: float = 0.01,
    strategy: str | None = None,
    warnings: tuple[str, ...] = (),
    reserved_bytes: int = 0,
    pinned: Plan | None = None,
) -> Plan:
    """Return the best verified plan found for ``workload`` within ``budget``.

    Args:
        workload: what to plan; op times for the machine's compute tier.
        machine: tiers, links and pipes.
        budget: bytes per tier.
        fingerprint: digests of what the plan is made from, written into it.
        time_limit_s: seconds the solver may take; the plan is then the best known.
        mip_gap: relative gap up to which a plan counts as optimal.
        strategy: plan with this one alone, for comparison: ``ilp`` or one of ``strategies.NAMES``.
        warnings: written into the plan.
        reserved_bytes: bytes of the compute tier that must stay free beside the plan's own.
        pinned: share this plan's arena: its residents stay where they are, the rest is streamed.

    Raises:
        InfeasiblePlanError: no plan keeps the budget; names the smallest that does.
        SolverError: the solver ended in a state that is not understood.
        UnsupportedOpError: an op has no time on the compute tier.
        ValueError: the strategy or a tensor's name is unknown.
    """
    begun_s = time.perf_counter()
    if strategy is not None and strategy not in (*NAMES, "ilp"):
        raise ValueError(
            f"unknown strategy {strategy!r}: choose one of {', '.join((*NAMES, 'ilp'))}"
        )
    task = problem(workload, machine, budget, reserved_bytes=reserved_bytes)
    if pinned is None:
        least_arena_bytes = feasible(task).arena_bytes
        found = _choose(task, least_arena_bytes, strategy, time_limit_s)
    else:
        found = pin(task, pinned)
    left_s = time_limit_s - (time.perf_counter() - begun_s)
    proof = prove(task, found.seconds, time_limit_s=left_s, mip_gap=mip_gap)
    certificate = certify(
        found.seconds,
        proof,
        solve_s=time.perf_counter() - begun_s,
        mip_gap=mip_gap,
    )
    plan = assemble(
        task,
        found,
        certificate,
        fingerprint=fingerprint,
        warnings=warnings,
        pinned=pinned_residents(pinned) if pinned else None,
    )
    verify(plan)
    return plan


def _choose(
    task: Problem, least_arena_bytes: int, strategy: str | None, time_limit_s: float
) -> Schedule:
    """Return the best schedule of one strategy, or of all of them."""
    found: Schedule | None = None
    if strategy is None:
        found = search(task, strategies(task), task.arena_limit_bytes)
        found = refine(task, least_arena_bytes, found, time_limit_s=time_limit_s)
    elif strategy == "ilp":
        found = refine(task, least_arena_bytes, None, time_limit_s=time_limit_s)
    else:
        found = _as_peer(task, strategy)
    # A forced strategy may find nothing that fits where the best of all does.
    found = found or search(task, strategies(task), task.arena_limit_bytes)
    assert found is not None, "a feasible problem has a schedule"
    return found


def _as_peer(task: Problem, strategy: str) -> Schedule | None:
    """Return what the peer that ``strategy`` names does: keep as much as fits, stream the rest."""
    for candidate in reversed(family(task, strategy)):
        for placement in homes(task, candidate.residents, strategy)[:1]:
            found = best_staging(task, placement, task.arena_limit_bytes)
            if found is not None:
                return found
    return None
