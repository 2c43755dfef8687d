"""Stream: the best plan that moves weights, through an arena with fixed addresses, and nothing else.

What ``compile`` executes is made here; training steps and workload files may take a plan of ``plan_intervals``
instead. Where the budget is too small for the activations, large ones leave memory between their uses. Forms
that divide large weights are tried side by side, and,
where ops may run at several sites, schedules that send ops to their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, SolverError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload
from gascompile.core.tiles import parse_tile
from gascompile.core.workload import Workload
from gascompile.cost_models.formulas.contention import giving_s
from gascompile.cost_models.formulas.gathers import gather_room
from gascompile.passes.bounds.certify import Proof
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.bounds.prove import prove
from gascompile.passes.bounds.prove_all import prove_all
from gascompile.passes.bounds.site_limit import has_sites
from gascompile.passes.bounds.site_segments import site_segments
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.problem import Problem, problem
from gascompile.passes.model.tiling import FormSolution, best_form, forms, same_form
from gascompile.passes.plan.assemble import keeps_budget
from gascompile.passes.plan.draft import Draft, draft_moved, draft_schedule, draft_sites
from gascompile.passes.plan.feasible import feasible
from gascompile.passes.search.divide_layers import divide_layers
from gascompile.passes.search.move_activations import (
    BUFFERS_BYTES,
    MovedActivations,
    move_activations,
)
from gascompile.passes.search.refine import refine
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import best_staging, search
from gascompile.passes.search.share_arena import residents_of, share_arena
from gascompile.passes.search.sites import SitedSchedule, sites
from gascompile.passes.search.strategies import family, placements_of, strategies
from gascompile.passes.search.two_hops import two_hops

_CLEAR_GAIN = 0.1
"""Of the time without other sites: with less, the solver may find a plan without them that is as good."""

_PARTS_GAIN = 0.05
"""Of the time with whole ops, that parts of layers on both processors have to save: they have more copies to be wrong
about, and their sums may round in another order."""
_MEETINGS = 3
"""Times what copies take processors to meet, that parts have to save as well. [Empirical] Eight layers of 1,024 with 32
rows met for 2.1 ms in 9.5 as measured beforehand, and took 14.6; with 128 rows for 2.3 in 24, and gained 1.24 x."""

_VAIN_FORMS = 2
"""Of the workload, in which weights have smaller and smaller tiles, that are tried without a better plan."""
_TILED = 2
"""Times the weights of the whole workload, where ops may run at other sites. [Empirical] A Llama of 1.1B in 2.8 GiB was
planned 8 % faster with 1.7 times as many than whole; with 5.4 times it took 25 s, and was twice as slow."""


def stream(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    *,
    effort: Effort,
    notes: list[str],
    strategy: str | None = None,
    reserved_bytes: int = 0,
    arena_of: Plan | None = None,
    has_hops: bool = True,
) -> tuple[Draft, Proof]:
    """Return the draft of the plan, and what no plan can beat: none that only moves weights, and none at all.

    Args:
        effort: what planning may take.
        notes: gets a line when the plan was made without something that could make it better.

    The others are those of ``make_plan``.

    Raises:
        InfeasiblePlanError: no such plan keeps the budget.
        SolverError: ``ilp`` alone was asked for, and the solver ended in a state not understood.
    """

    def solve(task: Problem) -> FormSolution:
        schedule, relaxed_s = (
            (share_arena(task, arena_of), 0.0)
            if arena_of
            else _choose(task, strategy, effort, notes, has_hops=has_hops)
        )
        proof = _prove(task, schedule.seconds, effort, notes, relaxed_s)
        return FormSolution(task=task, schedule=schedule, proof=proof)

    candidates = (
        [same_form(workload, machine, arena_of.workload)] if arena_of else forms(workload, machine)
    )
    limits = budget.limits_bytes(machine)
    candidates = [
        form
        for form in candidates
        if all(size <= limits.get(tier, 0) for tier, size in gather_room(form).items())
    ]
    tasks = [problem(form, machine, budget, reserved_bytes=reserved_bytes) for form in candidates]
    first = None
    if has_sites(workload.ops, machine) and strategy is None and arena_of is None:
        first, gain = _sited(tasks, budget)
        if first is not None and gain >= _CLEAR_GAIN:
            return first, _site_proof(first, tasks, workload)
    try:
        chosen = best_form(tasks, solve, effort)
    except InfeasiblePlanError as refusal:
        if first is not None:
            return first, _site_proof(first, tasks, workload)
        if arena_of is not None or strategy is not None:
            raise
        return _with_moved_activations(tasks, solve, refusal, effort)
    draft = draft_schedule(
        chosen.task, chosen.schedule, residents_of(arena_of) if arena_of else None
    )
    if not has_sites(workload.ops, machine):
        return draft, _over_all(chosen.proof, tasks, draft, effort, one_form=bool(arena_of))
    if first is not None and first.seconds < draft.seconds:
        draft = first
    return draft, _site_proof(draft, tasks, workload)


def _site_proof(draft: Draft, tasks: Sequence[Problem], whole: Workload) -> Proof:
    """Return what no plan beats where ops may run at other sites; divided the ``whole`` takes no less."""
    machine = tasks[0].machine
    # What is in parts does not count there, as in another form it may take less; the whole may be in any.
    may_divide = any(op.cuts for op in whole.ops)
    limit_s, binding = max(
        least_time(workload, machine, tasks[0].limits_bytes)
        for workload in (draft.workload, *([whole] if may_divide else []))
    )
    least_s = site_segments(whole, machine)
    return Proof(limit_s=limit_s, binding=binding, bound_s=least_s, all_s=least_s, timed_out=False)


def _over_all(
    proof: Proof,
    tasks: Sequence[Problem],
    draft: Draft,
    effort: Effort,
    *,
    one_form: bool,
) -> Proof:
    """Return the proof with what no plan beats that may move everything; the limit is that of all, too."""
    narrow_s = max(proof.limit_s, proof.bound_s)
    if one_form:
        task = tasks[0]
        limit_s, binding = least_time(draft.workload, task.machine, task.limits_bytes)
        return replace(proof, limit_s=limit_s, binding=binding, bound_s=narrow_s)
    floor = prove_all(tasks, draft.seconds, time_limit_s=effort.left_s(), mip_gap=effort.mip_gap)
    return replace(
        proof,
        limit_s=floor.limit_s,
        binding=floor.binding,
        bound_s=narrow_s,
        all_s=floor.bound_s,
    )


def _with_moved_activations(
    tasks: Sequence[Problem],
    solve: Callable[[Problem], FormSolution],
    refusal: InfeasiblePlanError,
    effort: Effort,
) -> tuple[Draft, Proof]:
    """Return the best plan in which activations move, too; raises the smaller of two refusals."""
    moved: list[MovedActivations] = []
    refusals = [refusal]
    for task in tasks:
        try:
            seconds = max(0.1, effort.time_limit_s / (2 * len(tasks)))
            moved += move_activations(task, time_limit_s=seconds, mip_gap=effort.mip_gap)
        except InfeasiblePlanError as error:
            refusals.append(error)
    if not moved:
        raise min(refusals, key=lambda error: error.required_bytes)
    chosen = best_form([candidate.task for candidate in moved], solve, effort)
    moves = next(candidate.moves for candidate in moved if candidate.task is chosen.task)
    draft = draft_moved(chosen.task, chosen.schedule, moves, buffer_bytes=BUFFERS_BYTES)
    task = chosen.task
    limit_s, binding = least_time(task.workload, task.machine, task.limits_bytes)
    return draft, replace(chosen.proof, limit_s=limit_s, binding=binding, bound_s=0.0)


def _sited(tasks: Sequence[Problem], budget: Budget) -> tuple[Draft | None, float]:
    """Return the best draft that sends ops to other sites, and what share of the time without that it saves.

    Parts of layers are sent, too, where that is clearly faster.

    Before anything that takes the solver's time: it is found in seconds, and often so much better that no better
    order of moves makes up for it.
    """
    best: Draft | None = None
    plain_s = math.inf
    vain = 0
    most_weights = _TILED * len(tasks[0].weights)
    for task in tasks:
        if task.arena_limit_bytes < 0 or vain >= _VAIN_FORMS or len(task.weights) > most_weights:
            continue
        alone = search(task, strategies(task), task.arena_limit_bytes)
        plain_s = min(plain_s, alone.seconds if alone is not None else math.inf)
        limit_s = min(plain_s, best.seconds if best is not None else math.inf)
        sited = sites(task, limit_s, partial(_keeps_budget, task))
        vain = 0 if sited is not None or best is None else vain + 1
        best = draft_sites(sited) if sited is not None else best
    for task in tasks:
        whole = all(parse_tile(op.name) is None for op in task.workload.ops)
        if task.arena_limit_bytes < 0 or not whole:
            continue
        limit_s = min(plain_s, best.seconds if best is not None else math.inf)
        again = partial(
            problem, machine=task.machine, budget=budget, reserved_bytes=task.reserved_bytes
        )
        least_s = (1 - _PARTS_GAIN) * limit_s
        sited = divide_layers(task, least_s, partial(_keeps_budget, task), again)
        if sited is not None and sited.seconds + _MEETINGS * _met_s(task, sited) < limit_s:
            best = draft_sites(sited)
    if best is None or math.isinf(plain_s):
        return best, float(best is not None)
    return best, 1 - best.seconds / plain_s


def _met_s(task: Problem, sited: SitedSchedule) -> float:
    """Return what the sites take to meet beside what links take."""
    if task.machine.contention is None:
        return 0.0
    copies = [step for step in sited.steps if isinstance(step, (Offload, Reload))]
    given_s = sum(giving_s(task.machine, copy.size_bytes) for copy in copies)
    return given_s + len(copies) * task.machine.contention.wake_s


def _keeps_budget(task: Problem, sited: SitedSchedule) -> bool:
    """Whether what ops take at all sites, and what is copied between them, is within the budget."""
    return keeps_budget(
        draft_sites(sited), task.machine, task.limits_bytes, reserved_bytes=task.reserved_bytes
    )


def _choose(
    task: Problem, strategy: str | None, effort: Effort, notes: list[str], *, has_hops: bool
) -> tuple[Schedule, float]:
    """Return the best schedule of one strategy, or of all of them, and what the relaxation showed on the way."""
    left_s = effort.left_s
    least_arena_bytes = feasible(task).arena_bytes
    schedule: Schedule | None = None
    relaxed_s = 0.0
    if strategy == "ilp":
        schedule, relaxed_s = refine(task, least_arena_bytes, None, effort)
    elif strategy is not None:
        schedule = _as_peer(task, strategy)
    # A forced strategy may have nothing that fits a budget which others keep.
    schedule = schedule or search(
        task, strategies(task), task.arena_limit_bytes, time_limit_s=left_s()
    )
    if strategy is None and has_hops:
        schedule = two_hops(task, schedule, mip_gap=effort.mip_gap, time_limit_s=left_s())
    if strategy is None:
        try:
            schedule, relaxed_s = refine(task, least_arena_bytes, schedule, effort)
        except SolverError as error:
            notes.append(f"planned without the integer program: {error}")
    assert schedule is not None, "a feasible problem has a schedule"
    return schedule, relaxed_s


def _prove(
    task: Problem,
    predicted_s: float,
    effort: Effort,
    notes: list[str],
    relaxed_s: float,
) -> Proof:
    """Return the solver's bound, or the physical limit alone where the solver fails."""
    prove_within = partial(
        prove,
        task,
        time_limit_s=effort.left_s(),
        mip_gap=effort.mip_gap,
        relaxed_s=relaxed_s,
        pivots=effort.pivots,
    )
    try:
        return prove_within(predicted_s)
    except SolverError as error:
        notes.append(f"the lower bound is the physical limit alone: {error}")
        return prove_within(0.0)


def _as_peer(task: Problem, strategy: str) -> Schedule | None:
    """Return what the peer that ``strategy`` names does: keep as much as fits, stream the rest."""
    for candidate in reversed(family(task, strategy)):
        for placement in placements_of(task, candidate.residents, strategy)[:1]:
            staged = best_staging(task, placement, task.arena_limit_bytes)
            if staged is not None:
                return staged
    return None
