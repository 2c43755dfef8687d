"""Make a plan: from a workload, a machine and a budget to steps and a certificate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, PlanVerificationError
from gascompile.core.machine import Interference, Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import PERSISTENT, OpSpec, Workload
from gascompile.cost_models.formulas.interference import lost_share, with_moving
from gascompile.cost_models.simulate.replay import link_bytes, lost_seconds, replay, runs
from gascompile.passes.bounds.certify import Proof, certify, needs_hops
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.bounds.linear_program import solver_name
from gascompile.passes.bounds.site_limit import has_sites
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.intervals.update_sites import SHARES, update_sites
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_problem import changed_bytes
from gascompile.passes.model.intervals import IntervalPlan
from gascompile.passes.plan.assemble import assemble, keeps_budget
from gascompile.passes.plan.draft import Draft, draft_intervals
from gascompile.passes.plan.least_energy import writes_weights
from gascompile.passes.plan.move_anything import OnHeap, contended_s, move_anything
from gascompile.passes.search.strategies import NAMES
from gascompile.passes.search.stream import stream
from gascompile.passes.verify.walk import verify

_log = logging.getLogger(__name__)

_NO_HIGHS = {
    "cbc": "HiGHS is not installed; CBC solved instead, slower: pip install highspy",
    "none": "no solver is installed; heuristics made the plan: pip install highspy",
}


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
    arena_of: Plan | None = None,
    move_all: bool = False,
    has_arena: bool = True,
    on_heap: OnHeap | None = None,
    has_hops: bool = True,
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
        arena_of: share this plan's arena: its residents stay where they are, the rest is streamed.
        move_all: activations, gradients and states may move too, and activations be recomputed. Without
            it only weights move, and the bound holds for such plans.
        has_arena: weights may be prefetched into an arena. Plans of ``move_all`` do without one where what runs
            them has none.
        on_heap: a plan without an arena, in which anything moves, may take the place of one with, where that is not
            feasible or takes longer by ``on_heap``'s measure.
        has_hops: weights of a drive may wait half the way, in the memory in between.

    Raises:
        InfeasiblePlanError: no plan keeps the budget; names the smallest that does.
        SolverError: ``ilp`` alone was asked for, and the solver ended in a state not understood.
        UnsupportedOpError: an op has no time on the compute tier.
        ValueError: the strategy or a tensor's name is unknown.
    """
    effort = Effort(time_limit_s=time_limit_s, mip_gap=mip_gap)
    limits_bytes = budget.limits_bytes(machine)
    reserved_bytes += machine.library_bytes(machine.compute_tier)
    require_known(strategy)
    # Planned in contention-free time, in which ops do not slow links down.
    quick, calm = _contention_free(workload, machine)
    solver = solver_name()
    notes = [*warnings, *([_NO_HIGHS[solver]] if solver in _NO_HIGHS else [])]

    def stream_weights() -> tuple[Draft, Proof]:
        return stream(
            quick,
            calm,
            budget,
            effort=effort,
            notes=notes,
            strategy=strategy,
            reserved_bytes=reserved_bytes,
            arena_of=arena_of,
            has_hops=has_hops,
        )

    if move_all:
        streams = stream_weights if has_arena else None
        more = (effort, reserved_bytes, machine)
        draft, proof = _best_of_all(quick, calm, limits_bytes, streams, *more)
    elif on_heap is None or strategy is not None or arena_of is not None:
        draft, proof = stream_weights()
    else:
        per_byte_s = machine.interference.op_s_per_byte
        draft, proof, reserved_bytes = move_anything(
            quick, calm, budget, stream_weights, on_heap, effort, reserved_bytes, per_byte_s
        )
    draft, proof = _contended(draft, proof, workload, machine, limits_bytes)
    proof = _without_disproved(proof, draft.seconds, notes)
    took_s = time_limit_s - effort.left_s()
    certificate = certify(draft.seconds, proof, solve_s=took_s, mip_gap=mip_gap, solver=solver)
    plan = assemble(
        draft,
        machine,
        limits_bytes,
        certificate,
        fingerprint=fingerprint,
        warnings=tuple(dict.fromkeys(notes)),
        reserved_bytes=reserved_bytes,
    )
    verify(plan)
    return plan


def require_known(strategy: str | None) -> None:
    """Return if there is such a strategy; raises ``ValueError``."""
    if strategy is not None and strategy not in (*NAMES, "ilp"):
        names = ", ".join((*NAMES, "ilp"))
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {names}")


def _without_disproved(proof: Proof, seconds: float, notes: list[str]) -> Proof:
    """Return the proof without bounds that the plan at hand beats, which it takes note of."""
    kept = proof.without_what_fails(seconds)
    if kept != proof:
        bounds = f"{proof.limit_s}, {proof.bound_s} or {proof.all_s} s"
        notes.append(f"a lower bound of {bounds} was dropped: this plan beats it")
    return kept


def _contention_free(workload: Workload, machine: Machine) -> tuple[Workload, Machine]:
    if not _has_interference(machine):
        return workload, machine
    quick = _scaled(workload, lambda op: 1 - lost_share(op, machine))
    return quick, replace(machine, interference=Interference())


def _contended(
    draft: Draft,
    proof: Proof,
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
) -> tuple[Draft, Proof]:
    """Return both in the machine's own time."""
    if not _has_interference(machine):
        return draft, proof
    slowed = _scaled(draft.workload, lambda op: 1 / (1 - lost_share(op, machine)))
    times_s = [op.time_s[site] for op, site in zip(slowed.ops, draft.op_sites, strict=True)]
    lost_s = lost_seconds(draft.steps, slowed.ops, times_s, machine)
    own = machine.compute_tier
    ops_s = sum(times_s[op] for op in runs(draft.steps) if draft.op_sites[op] == own)
    moved_bytes = sum(link_bytes(draft.steps, slowed.ops, machine).values())
    seconds = with_moving(
        draft.seconds + lost_s, ops_s=ops_s, moved_bytes=moved_bytes, machine=machine
    )
    if machine.contention is not None:
        # What ops lose to each other hangs on how long the links leave them.
        seconds = replay(
            draft.steps,
            slowed.ops,
            times_s,
            machine,
            repeats=slowed.repeats,
            sites=draft.op_sites,
            lasting=[t.name for t in slowed.tensors if t.kind in PERSISTENT],
        ).seconds
    draft = replace(draft, workload=slowed, seconds=seconds)
    # Each op of the workload runs once at least, at its fastest.
    lost_s = sum(lost_share(op, machine) * min(op.time_s.values()) for op in workload.ops)
    limit_s = with_moving(
        proof.limit_s + lost_s,
        ops_s=0.0
        if has_sites(workload.ops, machine)
        else sum(min(op.time_s.values()) for op in workload.ops),
        moved_bytes=_least_moved_bytes(workload, machine, limits_bytes),
        machine=machine,
    )
    bound_s = proof.bound_s + lost_s if proof.bound_s else 0.0
    all_s = proof.all_s + lost_s if proof.all_s else 0.0
    return draft, replace(proof, limit_s=limit_s, bound_s=bound_s, all_s=all_s)


def _least_moved_bytes(
    workload: Workload, machine: Machine, limits_bytes: Mapping[str, int]
) -> int:
    """Return the bytes that an iteration moves at least: what lasts and is used, beyond what the tier holds.

    What changes in iterations that follow each other has to go back as well.
    """
    if has_sites(workload.ops, machine):
        return 0
    in_rows = {name for op in workload.ops for name in op.gathers}
    read = {name for op in workload.ops for name in op.reads} - in_rows
    written = {name for op in workload.ops if workload.repeats for name in op.writes}
    lasting = {t.name: t.size_bytes for t in workload.tensors if t.kind in PERSISTENT}
    limit_bytes = limits_bytes[machine.compute_tier]
    # What stays may be what changes most: as much as fits of that need not go back.
    changed = changed_bytes(workload)
    patched_bytes = sum(changed[n] for n in written if n in lasting and changed[n] < lasting[n])
    sums = (
        sum(lasting[name] for name in read if name in lasting),
        sum(changed[name] for name in written if name in lasting) - patched_bytes,
    )
    return sum(max(0, size_bytes - limit_bytes) for size_bytes in sums)


def _has_interference(machine: Machine) -> bool:
    return bool(machine.interference.points or machine.interference.op_s_per_byte)


def _scaled(workload: Workload, factor: Callable[[OpSpec], float]) -> Workload:
    ops = (
        replace(op, time_s={site: time_s * factor(op) for site, time_s in op.time_s.items()})
        for op in workload.ops
    )
    return replace(workload, ops=tuple(ops))


def _best_of_all(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    stream_weights: Callable[[], tuple[Draft, Proof]] | None,
    effort: Effort,
    reserved_bytes: int,
    contended: Machine,
) -> tuple[Draft, Proof]:
    """Return the faster of a plan that moves weights and one that moves everything, and its proof."""
    op_s_per_byte = contended.interference.op_s_per_byte
    best: Draft | None = None
    all_s = 0.0
    refusals: list[InfeasiblePlanError] = []
    if stream_weights is not None and not writes_weights(workload):
        try:
            best, streamed = stream_weights()
            all_s = streamed.all_s
        except InfeasiblePlanError as error:
            refusals.append(error)
    limit_s, binding = least_time(workload, machine, limits_bytes)
    proof = Proof(limit_s=limit_s, binding=binding, bound_s=0.0, all_s=all_s, timed_out=False)
    if best is not None and best.seconds - max(limit_s, all_s) <= effort.mip_gap * best.seconds:
        return best, proof
    if best is not None and effort.left_s() <= 0:
        return best, replace(proof, timed_out=True)
    try:
        interval_plan: IntervalPlan | None = plan_intervals(
            workload,
            machine,
            limits_bytes,
            effort=effort,
            reserved_bytes=reserved_bytes,
            op_s_per_byte=op_s_per_byte,
            bound_s=all_s,
        )
    except InfeasiblePlanError as error:
        interval_plan = None
        refusals.append(error)
    if has_sites(workload.ops, machine):
        interval_plan = _with_updates(
            workload, machine, limits_bytes, interval_plan, reserved_bytes, effort
        )
    if interval_plan is None:
        if best is None:
            raise min(refusals, key=lambda refusal: refusal.required_bytes) from None
        return best, proof
    moved = draft_intervals(workload, interval_plan)
    if best is None or contended_s(moved, machine, op_s_per_byte) < contended_s(
        best, machine, op_s_per_byte
    ):
        best = moved
    # Forms, sites and two hops are outside what bounds the intervals.
    if (
        not any(op.splits or op.gathers for op in workload.ops)
        and not has_sites(workload.ops, machine)
        and not needs_hops(workload, machine, limits_bytes)
    ):
        proof = replace(proof, all_s=max(all_s, interval_plan.bound_s))
    return best, replace(proof, timed_out=interval_plan.timed_out)


def _with_updates(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    interval_plan: IntervalPlan | None,
    reserved_bytes: int,
    effort: Effort,
) -> IntervalPlan | None:
    """Return the given plan, or a faster one with updates where moments rest, which may fit where no other does."""

    def planned(
        rest: Workload, left_bytes: Mapping[str, int], staying: Sequence[str]
    ) -> IntervalPlan:
        return plan_intervals(
            rest,
            machine,
            left_bytes,
            effort=Effort(time_limit_s=effort.time_limit_s / len(SHARES), mip_gap=effort.mip_gap),
            reserved_bytes=reserved_bytes,
            staying=staying,
        )

    def fits(plan: IntervalPlan) -> bool:
        draft = draft_intervals(workload, plan)
        try:
            return keeps_budget(draft, machine, limits_bytes, reserved_bytes=reserved_bytes)
        except PlanVerificationError as error:
            _log.debug("updates elsewhere break a rule: %s", error)
            return False

    return (
        update_sites(workload, machine, limits_bytes, interval_plan, planned, fits) or interval_plan
    )
