"""Move anything: a plan without an arena takes the place of one with, where states or activations are in the way.

An arena is faster to run and its plans divide large layers; so it is given up only where it does not fit, or for
what is worth it. Where next to nothing but weights takes memory, nothing is searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.workload import TensorKind, Workload
from gascompile.cost_models.formulas.gathers import gather_room
from gascompile.cost_models.simulate.replay import link_bytes, runs
from gascompile.passes.bounds.certify import Proof
from gascompile.passes.bounds.prove_all import prove_all
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.liveness import liveness
from gascompile.passes.model.problem import problem
from gascompile.passes.model.tiling import forms
from gascompile.passes.plan.draft import Draft, draft_intervals

_WORTH = 0.05
"""Share of an iteration that has to be gained: without an arena ops run one by one, not as compiled kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHeap:
    """What a plan without an arena has to know of what runs it."""

    reserved_bytes: int = 0
    """Of the tier that computes, for transfers."""
    staying: frozenset[str] = frozenset()
    """Tensors that never leave."""
    recompute: bool = True
    """Whether ops may run again."""
    gathers: bool = True
    """Whether ops may read single rows by themselves."""
    gains: bool = True
    """Whether such a plan may take the place of one with an arena that fits."""


Streamed = tuple[Draft, Proof]
"""A draft with an arena, and what no plan beats."""


def move_anything(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    stream_weights: Callable[[], Streamed],
    on_heap: OnHeap,
    effort: Effort,
    reserved_bytes: int,
    op_s_per_byte: float,
) -> tuple[Draft, Proof, int]:
    """Return the plan's draft, what no plan beats, and the bytes of the compute tier that are not the plan's.

    Args:
        stream_weights: returns the best draft with an arena; see ``stream``.
        op_s_per_byte: processors' time that moving a byte takes from ops.

    The others are those of ``make_plan``.

    Raises:
        InfeasiblePlanError: neither keeps the budget; names the smallest that one of them does.
    """
    best: Streamed | None = None
    refusal: InfeasiblePlanError | None = None
    try:
        best = stream_weights()
    except InfeasiblePlanError as error:
        if on_heap.staying.issuperset(_states(workload)):
            # Activations have moved there by then, and the smallest budget is known to the byte.
            raise
        refusal = error
    if best is not None and not (on_heap.gains and _may_gain(*best, workload, machine, effort)):
        return *best, reserved_bytes
    taken_bytes = reserved_bytes + on_heap.reserved_bytes
    if best is not None:
        # Where they fit they are the caller's own tensors, which ops change in place.
        on_heap = replace(on_heap, staying=on_heap.staying.union(_states(workload)))
    try:
        moved, timed_out = _moved(
            workload, machine, budget, on_heap, effort, taken_bytes, op_s_per_byte
        )
    except InfeasiblePlanError as error:
        if best is not None:
            return *best, reserved_bytes
        assert refusal is not None, "there is a plan or a refusal"
        raise min((refusal, error), key=lambda each: each.required_bytes) from None
    if best is not None:
        draft, _ = best
        gained_s = contended_s(draft, machine, op_s_per_byte) - contended_s(
            moved, machine, op_s_per_byte
        )
        if gained_s <= _WORTH * draft.seconds:
            return *best, reserved_bytes
    tasks = [
        problem(form, machine, budget, reserved_bytes=reserved_bytes)
        for form in forms(workload, machine)
    ]
    left_s = max(effort.left_s(), 0.1)
    floor = prove_all(tasks, moved.seconds, time_limit_s=left_s, mip_gap=effort.mip_gap)
    proof = Proof(
        limit_s=floor.limit_s,
        binding=floor.binding,
        bound_s=0.0,
        all_s=floor.bound_s,
        timed_out=timed_out,
    )
    return moved, proof, taken_bytes


def _states(workload: Workload) -> frozenset[str]:
    return frozenset(t.name for t in workload.tensors if t.kind is TensorKind.STATE)


def _may_gain(
    draft: Draft, proof: Proof, workload: Workload, machine: Machine, effort: Effort
) -> bool:
    """Return whether another plan may be better by enough to be looked for."""
    bound_s = max(proof.limit_s, proof.all_s)
    most_s = min(draft.seconds - bound_s, _most_gained_s(workload, machine))
    return most_s > _WORTH * draft.seconds and effort.left_s() > 0


def _moved(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    on_heap: OnHeap,
    effort: Effort,
    taken_bytes: int,
    op_s_per_byte: float,
) -> tuple[Draft, bool]:
    """Return the best draft without an arena, and whether the clock ended the search."""
    limits_bytes = budget.limits_bytes(machine)
    # Rows of a table come one by one here, too; layers stay whole.
    whole = forms(workload, machine)[0] if on_heap.gathers else workload
    if any(size > limits_bytes.get(tier, 0) for tier, size in gather_room(whole).items()):
        whole = workload
    interval_plan = plan_intervals(
        whole,
        machine,
        limits_bytes,
        reserved_bytes=taken_bytes,
        effort=replace(
            effort,
            time_limit_s=max(effort.left_s(), effort.time_limit_s / 2),
            begun_s=time.perf_counter(),
        ),
        recompute=on_heap.recompute,
        op_s_per_byte=op_s_per_byte,
        staying=on_heap.staying,
    )
    return draft_intervals(whole, interval_plan), interval_plan.timed_out


def _most_gained_s(workload: Workload, machine: Machine) -> float:
    """Return the most that an iteration gains if nothing but weights takes memory any more.

    Each byte of memory saves the transfer of one byte, over the slowest link at most.
    """
    live = liveness(workload)
    rates = [link.bandwidth_bytes_per_s for link in machine.links_into(machine.compute_tier)]
    return (live.state_bytes + live.peak_bytes) / min(rates) if rates else 0.0


def contended_s(draft: Draft, machine: Machine, op_s_per_byte: float) -> float:
    """Return the seconds of a draft in which the processors also have to move its bytes."""
    ops = draft.workload.ops
    own = machine.compute_tier
    ops_s = sum(ops[op].time_s[own] for op in runs(draft.steps) if draft.op_sites[op] == own)
    moved_bytes = sum(link_bytes(draft.steps, ops, machine).values())
    return max(draft.seconds, ops_s + moved_bytes * op_s_per_byte)
