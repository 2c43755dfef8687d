"""Make a plan: from a workload, a machine and a budget to steps with addresses and a certificate."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gascompile.ir import Budget, Machine, Plan, Workload
from gascompile.passes.assemble import assemble
from gascompile.passes.certify import certify, physical_limit
from gascompile.passes.feasible import feasible
from gascompile.passes.pin import pin, pinned_residents
from gascompile.passes.problem import Problem, problem
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
        feasible(task)
        found = _forced(task, strategy) if strategy else None
        found = found or search(task, strategies(task), task.arena_limit_bytes)
        assert found is not None, "a feasible problem has a schedule"
    else:
        found = pin(task, pinned)
    certificate = certify(
        found.seconds,
        limit=_limit(task),
        bound_s=0.0,
        timed_out=False,
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


def _limit(task: Problem) -> tuple[float, str]:
    return physical_limit(
        task.compute_s,
        sum(weight.size_bytes for weight in task.weights if weight.uses),
        task.arena_limit_bytes,
        task.machine,
    )


def _forced(task: Problem, strategy: str) -> Schedule | None:
    """Return what the peer that ``strategy`` names would do: keep as much as fits, stream the rest."""
    for candidate in reversed(family(task, strategy)):
        for placement in homes(task, candidate.residents, strategy)[:1]:
            found = best_staging(task, placement, task.arena_limit_bytes)
            if found is not None:
                return found
    return None
