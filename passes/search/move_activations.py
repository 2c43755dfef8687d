"""Move activations: large ones leave memory between their uses, so that a smaller budget is enough.

The weights keep their arena; what is left of the budget is planned as intervals of the activations that
can move: the whole result of one op, of some size. Everything else counts as workspace of the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.sizes import MIB, SPILL_BUFFER_BYTES
from gascompile.core.steps import Compute, Step
from gascompile.core.tiles import result_name
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.liveness import live_bytes
from gascompile.passes.model.problem import Problem
from gascompile.passes.plan.feasible import least_need

_LEAST_BYTES = MIB
"""Smaller activations are not worth a transfer each way."""
BUFFERS_BYTES = 2 * SPILL_BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class MovedActivations:
    """A problem with fewer activations in memory, and the steps that keep the others away."""

    task: Problem
    moves: Mapping[int, Sequence[Step]]
    """Per op the steps before it."""


def move_activations(
    task: Problem, *, time_limit_s: float, mip_gap: float
) -> list[MovedActivations]:
    """Return ``task`` with fewer activations in memory, for several shares of what weights leave.

    Raises:
        InfeasiblePlanError: the budget is too small for that, too, or nothing can move.
    """
    site = task.machine.compute_tier
    limit_bytes = task.limits_bytes[site]
    movable = _movable(task.workload)
    need = least_need(task)
    taken_bytes = need.arena_bytes + task.live.state_bytes + task.reserved_bytes + BUFFERS_BYTES
    reduced = _only(task.workload, movable)
    least_bytes, op = _least(reduced)
    if not movable or least_bytes + taken_bytes > limit_bytes:
        raise InfeasiblePlanError(
            required_bytes=min(
                task.base_bytes + need.arena_bytes,
                least_bytes + taken_bytes if movable else task.base_bytes + need.arena_bytes,
            ),
            limit_bytes=limit_bytes,
            tier=site,
            op=op,
        )
    spare_bytes = limit_bytes - taken_bytes - least_bytes
    variants: list[MovedActivations] = []
    refusals: list[InfeasiblePlanError] = []
    for share in sorted({0, spare_bytes // 2, spare_bytes}):
        peak_bytes = least_bytes + share
        try:
            moves = _moves(
                task, reduced, peak_bytes, Effort(time_limit_s=time_limit_s / 3, mip_gap=mip_gap)
            )
        except InfeasiblePlanError as error:
            # Where little can leave, as the slow tier is small, a larger share may still do.
            refusals.append(error)
            continue
        live = replace(task.live, peak_bytes=peak_bytes + BUFFERS_BYTES)
        variants.append(MovedActivations(replace(task, live=live), moves))
    if not variants:
        least = min(refusals, key=lambda error: error.required_bytes)
        raise InfeasiblePlanError(
            required_bytes=min(
                task.base_bytes + need.arena_bytes, taken_bytes + least.required_bytes
            ),
            limit_bytes=limit_bytes,
            tier=site,
            op=least.op,
        )
    return variants


def _moves(
    task: Problem, reduced: Workload, peak_bytes: int, effort: Effort
) -> dict[int, list[Step]]:
    limits = {**task.limits_bytes, **task.room_bytes, task.machine.compute_tier: peak_bytes}
    plan = plan_intervals(reduced, task.machine, limits, effort=effort, recompute=False)
    return _by_op(plan.steps)


def _by_op(steps: Sequence[Step]) -> dict[int, list[Step]]:
    moves: dict[int, list[Step]] = {}
    op = 0
    for step in steps:
        if isinstance(step, Compute):
            op = step.op + 1
        else:
            moves.setdefault(op, []).append(step)
    return moves


def _least(workload: Workload) -> tuple[int, str]:
    """Return what the op that needs most has to have in memory, and its name."""
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    needs = [
        (op.workspace_bytes + sum(sizes[name] for name in {*op.reads, *op.writes}), op.name)
        for op in workload.ops
    ]
    return max(needs, default=(0, workload.name))


def _movable(workload: Workload) -> frozenset[str]:
    """Return the activations that are the whole result of an op."""
    made = {result_name(op.name, op.writes) for op in workload.ops}
    return frozenset(
        tensor.name
        for tensor in workload.tensors
        if tensor.kind == TensorKind.ACTIVATION
        and tensor.size_bytes >= _LEAST_BYTES
        and tensor.name in made
    )


def _only(workload: Workload, movable: frozenset[str]) -> Workload:
    """Return the workload of the movable activations; the others are workspace."""
    others = replace(
        workload,
        tensors=tuple(
            replace(tensor, size_bytes=0) if tensor.name in movable else tensor
            for tensor in workload.tensors
        ),
    )
    return replace(
        workload,
        tensors=tuple(tensor for tensor in workload.tensors if tensor.name in movable),
        ops=tuple(
            _bare(op, held, movable)
            for op, held in zip(workload.ops, live_bytes(others), strict=True)
        ),
    )


def _bare(op: OpSpec, held_bytes: int, movable: frozenset[str]) -> OpSpec:
    def kept(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in movable)

    return replace(
        op,
        reads=kept(op.reads),
        writes=kept(op.writes),
        workspace_bytes=held_bytes,
        splits={},
        gathers={},
    )
