"""Make a plan: from a workload, a machine and a budget to steps with addresses and a certificate."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gascompile.errors import SolverError
from gascompile.ir import Budget, Machine, Plan, Workload
from gascompile.passes.assemble import assemble
from gascompile.passes.certify import Proof, certify
from gascompile.passes.feasible import feasible
from gascompile.passes.forms import Solution, best_form, forms, same_form
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
        SolverError: ``ilp`` alone was asked for, and the solver ended in a state not understood.
        UnsupportedOpError: an op has no time on the compute tier.
        ValueError: the strategy or a tensor's name is unknown.
    """
    begun_s = time.perf_counter()
    if strategy is not None and strategy not in (*NAMES, "ilp"):
        raise ValueError(
            f"unknown strategy {strategy!r}: choose one of {', '.join((*NAMES, 'ilp'))}"
        )
    notes = list(warnings)

    def left_s() -> float:
        return time_limit_s - (time.perf_counter() - begun_s)

    def solve(task: Problem) -> Solution:
        found = pin(task, pinned) if pinned else _choose(task, strategy, left_s(), notes)
        proof = _prove(task, found.seconds, left_s(), mip_gap, notes)
        return Solution(task=task, schedule=found, proof=proof)

    candidates = (
        [same_form(workload, machine, pinned.workload)] if pinned else forms(workload, machine)
    )
    chosen = best_form(
        [problem(form, machine, budget, reserved_bytes=reserved_bytes) for form in candidates],
        solve,
        mip_gap=mip_gap,
    )
    found = chosen.schedule
    certificate = certify(
        found.seconds, chosen.proof, solve_s=time.perf_counter() - begun_s, mip_gap=mip_gap
    )
    plan = assemble(
        chosen.task,
        found,
        certificate,
        fingerprint=fingerprint,
        warnings=tuple(notes),
        pinned=pinned_residents(pinned) if pinned else None,
    )
    verify(plan)
    return plan


def _choose(task: Problem, strategy: str | None, time_limit_s: float, notes: list[str]) -> Schedule:
    """Return the best schedule of one strategy, or of all of them."""
    least_arena_bytes = feasible(task).arena_bytes
    found: Schedule | None = None
    if strategy == "ilp":
        found = refine(task, least_arena_bytes, None, time_limit_s=time_limit_s)
    elif strategy is not None:
        found = _as_peer(task, strategy)
    # A forced strategy may have nothing that fits a budget which others keep.
    found = found or search(task, strategies(task), task.arena_limit_bytes)
    if strategy is None:
        try:
            found = refine(task, least_arena_bytes, found, time_limit_s=time_limit_s)
        except SolverError as error:
            notes.append(f"planned without the integer program: {error}")
    assert found is not None, "a feasible problem has a schedule"
    return found


def _prove(
    task: Problem, predicted_s: float, time_limit_s: float, mip_gap: float, notes: list[str]
) -> Proof:
    """Return the solver's bound, or the physical limit alone where the solver fails."""
    try:
        return prove(task, predicted_s, time_limit_s=time_limit_s, mip_gap=mip_gap)
    except SolverError as error:
        notes.append(f"the lower bound is the physical limit alone: {error}")
        return prove(task, 0.0, time_limit_s=time_limit_s, mip_gap=mip_gap)


def _as_peer(task: Problem, strategy: str) -> Schedule | None:
    """Return what the peer that ``strategy`` names does: keep as much as fits, stream the rest."""
    for candidate in reversed(family(task, strategy)):
        for placement in homes(task, candidate.residents, strategy)[:1]:
            found = best_staging(task, placement, task.arena_limit_bytes)
            if found is not None:
                return found
    return None
