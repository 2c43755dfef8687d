"""Plan intervals: what leaves the compute tier between its uses, where to, and what is recomputed.

Heuristics of other systems come first, then roundings of a linear program (``interval_program``), then
changes where the replay of the best one stalls. The fastest of all is the plan, so it is never slower
than any of them. The program's optimum bounds every plan from below.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NoReturn

import numpy as np

from gascompile.core.errors import InfeasiblePlanError, SolverError
from gascompile.core.machine import Machine
from gascompile.core.steps import Step
from gascompile.core.workload import TensorKind, Workload
from gascompile.cost_models.simulate.events import steady_seconds
from gascompile.cost_models.simulate.replay import compile_events
from gascompile.passes.intervals.events import interval_steps
from gascompile.passes.intervals.exact import Optimum, interval_exact
from gascompile.passes.intervals.fewer_moves import fewer_moves
from gascompile.passes.intervals.guides import Guides
from gascompile.passes.intervals.improve import improve
from gascompile.passes.intervals.join_views import JoinedOps, join_views
from gascompile.passes.intervals.queueing import queueing
from gascompile.passes.intervals.recompute import IntervalRecompute, interval_recompute
from gascompile.passes.intervals.recompute_moves import least_excess
from gascompile.passes.intervals.recompute_search import recompute_search
from gascompile.passes.intervals.search import FEW_TENSORS, ScheduledSelection, Search
from gascompile.passes.intervals.seeds import (
    RECOMPUTE_RATIOS,
    Seed,
    cheap,
    last_resorts,
    roomy,
    seeds,
    way_s,
)
from gascompile.passes.intervals.selection import Selection
from gascompile.passes.intervals.strategies import all_moved, furthest_use
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_layout import layout
from gascompile.passes.model.interval_problem import IntervalProblem, interval_problem
from gascompile.passes.model.intervals import IntervalPlan

_FIRST_GUIDES = 2
"""Which are rounded before the best schedules are changed where they stall; the others take turns with that."""
_RESERVE_SHARE = 0.2
"""Share of the work that is left in which reservations are tried."""
_FIRST_SHARE = 0.1
"""Share of the work after which heuristics give way to the program."""
_SWEEP_SHARE = 0.3
"""Share of the work that is left in which amounts of recomputation are tried."""
_MANY_TENSORS = 300
"""Workloads of more are refused a budget, too, when the clock has run out before anything fits."""
_FEW_LABELS = 30_000  # before all other searches
_MOST_LABELS = 100_000
"""How far small problems are gone through: before and after all other searches."""
_ATTEMPTS = 400
"""Changes of recomputations of few tensors after which a budget is refused."""
_SEEDS = 64  # walks at most; their work mostly ends a search before
_FRUITLESS, _FEW_FRUITLESS = 60, 10
"""Changes in a row that may be in vain: in a walk, and before programs are rounded."""
_FEW_SHARE = 0.15
"""Share of the work that is left for changes before programs are rounded."""
_PATIENCE, _LONG_PATIENCE = 4, 16
"""Walks in a row that may find nothing better, of many tensors and of few."""


def plan_intervals(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    *,
    effort: Effort,
    reserved_bytes: int = 0,
    recompute: bool = True,
    op_s_per_byte: float = 0.0,
    bound_s: float = 0.0,
    staying: Collection[str] = (),
) -> IntervalPlan:
    """Return the fastest moves found that keep every tier's limit in program order.

    Args:
        workload: any; its tensors all live on the heap, in bytes as they are.
        machine: tiers, and links into and out of the compute tier.
        limits_bytes: budget per tier; a tier without one holds what the machine says.
        effort: seconds of the search, and the gap to the bound at which it may stop.
        reserved_bytes: bytes of the compute tier that are not the plan's.
        recompute: whether ops may run again.
        op_s_per_byte: processors' time that moving a byte takes from ops; the fastest plan is then one that
            counts it, though its seconds do not.
        bound_s: what no plan beats, as far as is known; the search ends near it.
        staying: tensors that never leave.

    Raises:
        InfeasiblePlanError: nothing fits; names the smallest budget that does, and its op.
        UnsupportedOpError: an op has no time on the compute tier.
        ValueError: an op names a tensor that the workload does not list.
    """
    joined = join_views(workload, machine.compute_tier) if _is_large(workload) else None
    task = interval_problem(
        joined.workload if joined is not None else workload,
        machine,
        limits_bytes,
        reserved_bytes=reserved_bytes,
        recompute=recompute,
        op_s_per_byte=op_s_per_byte,
        staying=staying,
    )
    if joined is not None:
        task = replace(task, views_s=joined.views_s)
    plan = _of_all(task, effort, reserved_bytes, bound_s)
    return _apart(plan, joined, workload, machine) if joined is not None else plan


def _is_large(workload: Workload) -> bool:
    """Whether views are joined to other ops; few tensors are searched with all their freedom."""
    return sum(tensor.kind != TensorKind.INPUT for tensor in workload.tensors) > FEW_TENSORS


def _apart(
    plan: IntervalPlan, joined: JoinedOps, workload: Workload, machine: Machine
) -> IntervalPlan:
    """Return the plan of the whole workload, with each op by itself again."""
    steps, site = joined.apart(plan.steps), machine.compute_tier
    times_s = [op.time_s[site] for op in workload.ops]
    seconds = steady_seconds(compile_events(steps, times_s, machine, repeats=workload.repeats))
    return replace(
        plan,
        steps=steps,
        sites=(site,) * len(workload.ops),
        seconds=seconds,
        bound_s=min(plan.bound_s, seconds),  # sums in another order are rounded otherwise
    )


def _of_all(
    task: IntervalProblem, effort: Effort, reserved_bytes: int, bound_s: float
) -> IntervalPlan:
    # Engines of a GPU's own move beside its ops; elsewhere the processors do.
    is_free = task.machine.compute_backend == "cuda"
    small = task.without_small() if len(task.names) > FEW_TENSORS else task
    if small.fixed and all_moved(layout(small)).fits:
        with contextlib.suppress(InfeasiblePlanError):
            return _guided(Search(small, effort), reserved_bytes, bound_s, is_free=is_free)
    return _guided(Search(task, effort), reserved_bytes, bound_s, is_free=is_free)


def _guided(search: Search, reserved_bytes: int, bound_s: float, *, is_free: bool) -> IntervalPlan:
    search.bound_s = max(search.task.compute_s, bound_s)
    recomputes = interval_recompute(search.base)
    with contextlib.closing(Guides(search, recomputes)) as guides:
        return _searched(search, recomputes, guides, reserved_bytes, is_free=is_free)


def _searched(
    search: Search,
    recomputes: Mapping[int, IntervalRecompute],
    guides: Guides,
    reserved_bytes: int,
    *,
    is_free: bool,
) -> IntervalPlan:
    task = search.task
    candidates = seeds(search.base, recomputes)
    least = _begin(search, recomputes, candidates, guides)
    exact = None
    # Where only a part is written out, that depends on where a tensor rests, of which the list there knows nothing.
    if not (search.done or task.fixed or task.has_patches) and (
        search.best is None or not task.op_s_per_byte
    ):
        exact = _all_of(search, _FEW_LABELS, search.left_s / 2)
    if search.best is None and (exact is None or not exact.steps):
        _refuse(least, reserved_bytes)
    if exact is not None and exact.steps:
        return _exact_plan(task, exact)
    if exact is not None and exact.complete and search.best is not None:
        search.bound_s = search.best.seconds
    solver = _refined(search, recomputes, candidates, guides)
    unsure = exact is not None and not exact.complete and not task.op_s_per_byte
    if unsure and not (search.finished or search.within_gap):
        exact = _all_of(search, _MOST_LABELS, search.left_s)
        if exact is not None and exact.steps:
            return _exact_plan(task, exact)
        if exact is not None and exact.complete and search.best is not None:
            search.bound_s = search.best.seconds
    return _plan(search, fewer_moves(search, recomputes, is_free=is_free), solver)


def _all_of(search: Search, max_labels: int, time_limit_s: float) -> Optimum | None:
    """Go through all lists of steps of a small problem; labels are counted, so that a busy machine finds no less."""
    known_s = search.best.seconds if search.best is not None else math.inf
    return interval_exact(search.task, known_s, time_limit_s=time_limit_s, max_labels=max_labels)


def _refined(
    search: Search,
    recomputes: Mapping[int, IntervalRecompute],
    candidates: Iterator[Seed],
    guides: Guides,
) -> str:
    """Consider what the program says, the other heuristics and changes; return the solver's name."""
    if search.done:
        return "none"
    few = len(search.task.names) <= FEW_TENSORS
    if not few:
        # What needs no solver is done while it is at the proof.
        _tried(search, chain(candidates, roomy(search.base)), (None,))
    try:
        solver = _bounded(search, recomputes, guides)
    except SolverError:
        # The heuristics' plan stands, and so does the bound that needs no solver.
        solver = "none"
    if few:
        _tried(search, candidates, (None, 0.0))
    for leader_of_strategy in search.leaders():
        improve(
            search, leader_of_strategy, random.Random(0), patience=_FEW_FRUITLESS, share=_FEW_SHARE
        )
    fruitless = 0
    patience = _LONG_PATIENCE if few else _PATIENCE
    for seed in range(_SEEDS):
        before = search.best
        # As above: without the solver's answer the best plan stands.
        with contextlib.suppress(SolverError):
            guides.consider(0 if solver == "none" else 1 if seed else _FIRST_GUIDES)
        if search.finished or fruitless == patience:
            break
        leaders = search.leaders()
        leader = leaders[seed % len(leaders)]
        improve(search, leader, random.Random(seed), patience=_FRUITLESS)
        fruitless = fruitless + 1 if search.best is before else 0
    return solver


def _tried(search: Search, candidates: Iterable[Seed], leads_s: Sequence[float | None]) -> None:
    """Consider candidates with each lead, as long as that is worth it."""
    for name, selection in candidates:
        if search.finished:
            break
        for lead_s in leads_s:
            search.try_once(name, selection, lead_s)


def _plan(search: Search, best: ScheduledSelection, solver: str) -> IntervalPlan:
    task = search.task
    steps = interval_steps(best.schedule)
    seconds = _replayed_s(task, steps)
    return IntervalPlan(
        steps=steps,
        homes=_homes(best),
        sites=(task.machine.compute_tier,) * len(task.reads),
        seconds=seconds,
        bound_s=min(search.bound_s, max(seconds, best.seconds)),
        timed_out=search.out_of_time and not search.within_gap,
        strategy=best.strategy,
        solver=solver,
    )


def _exact_plan(task: IntervalProblem, exact: Optimum) -> IntervalPlan:
    site = task.machine.compute_tier
    homes = {tensor.name: site for tensor in task.workload.tensors}
    homes |= {task.names[x]: task.routes[route].tier for x, route in exact.homes.items()}
    seconds = _replayed_s(task, exact.steps)
    return IntervalPlan(
        steps=exact.steps,
        homes=homes,
        sites=(site,) * len(task.reads),
        seconds=seconds,
        bound_s=seconds,
        timed_out=False,
        strategy="exhaustive",
        solver="none",
    )


def _replayed_s(task: IntervalProblem, steps: tuple[Step, ...]) -> float:
    """Return what the reference replay says; the search's own events give the same but for rounding."""
    repeats = task.workload.repeats
    events = compile_events(steps, task.op_times_s, task.machine, repeats=repeats)
    return steady_seconds(events)


def _begin(
    search: Search,
    recomputes: Mapping[int, IntervalRecompute],
    candidates: Iterator[Seed],
    guides: Guides,
) -> Selection:
    """Consider heuristics, and where none fits whatever else might; return what needs least."""
    least: Selection | None = None
    begun = search.work
    for name, selection in candidates:
        search.try_once(name, selection)
        first = least is None
        if least is None or selection.excess_bytes < least.excess_bytes:
            least = selection
        if first and not search.done:
            if len(search.task.names) > FEW_TENSORS:
                guides.begin_proof()
            _reserve(search, recomputes)
        late = search.best is not None and search.over(begun, _FIRST_SHARE)
        if search.done or late:
            break
    assert least is not None, "there are heuristics"
    few = len(search.task.names) <= FEW_TENSORS
    if search.best is None and few:
        rest = least_excess(search.base, random.Random(0), _ATTEMPTS)
        least = min(least, rest, key=lambda candidate: candidate.excess_bytes)
        if rest.fits:
            search.consider("all_moved_recompute", rest)
    if search.best is None:
        # What is quickly gone through is: no budget is refused because a machine was busy.
        large = len(search.task.names) > _MANY_TENSORS
        for name, selection in last_resorts(search.base, recomputes):
            least = min(least, selection, key=lambda candidate: candidate.excess_bytes)
            if search.consider(name, selection) is not None or (large and search.out_of_time):
                break
    return least


def _reserve(search: Search, recomputes: Mapping[int, IntervalRecompute]) -> None:
    """Consider reservations for what is used last, with more and more of what is cheap recomputed."""
    sets = dict.fromkeys(cheap(search.base, recomputes, ratio) for ratio in RECOMPUTE_RATIOS)
    variants = [frozenset[tuple[int, int]](), *(dropped for dropped in sets if dropped)]
    for dropped in variants:
        selection = furthest_use(layout(search.task, dropped) if dropped else search.base)
        queueing(
            search,
            "reserved_recompute" if dropped else "reserved",
            selection,
            share=_RESERVE_SHARE / len(variants),
        )
        if search.finished:
            return


def _bounded(search: Search, recomputes: Mapping[int, IntervalRecompute], guides: Guides) -> str:
    """Bound the search by the program and consider recomputation at its prices; return the solver's name."""
    proof = guides.proof()
    search.bound_s = max(search.bound_s, proof.bound_s)
    if not search.finished:
        guides.begin(_FIRST_GUIDES)
    guides.round(proof)
    prices_s = proof.prices_s or {j: way_s(search.base, j) for j in recomputes}
    recompute_search(search, recomputes, prices_s, share=_SWEEP_SHARE)
    return proof.solver


def _refuse(least: Selection, reserved_bytes: int) -> NoReturn:
    """Raise the error that names the smallest budget of the compute tier that was found to do."""
    base, memory = least.plan, least.memory
    op = min(base.runs[int(np.argmax(memory))].op, len(base.task.reads) - 1)
    raise InfeasiblePlanError(
        required_bytes=int(memory.max()) + reserved_bytes,
        limit_bytes=base.task.limit_bytes + reserved_bytes,
        tier=base.task.machine.compute_tier,
        op=base.task.workload.ops[op].name,
    )


def _homes(best: ScheduledSelection) -> dict[str, str]:
    """Return the tier in which each tensor rests around the end of the list."""
    plan = best.schedule.layout
    task = plan.task
    homes = {tensor.name: task.machine.compute_tier for tensor in task.workload.tensors}
    for j, route in best.selection.routes.items():
        interval = plan.intervals[j]
        clean = task.persistent[interval.tensor] and not task.written[interval.tensor]
        given = clean and (interval.unused or task.workload.repeats)
        around = task.persistent[interval.tensor] and interval.wraps
        if given or around or j in best.schedule.ahead:
            homes[task.names[interval.tensor]] = task.routes[route].tier
    return homes
