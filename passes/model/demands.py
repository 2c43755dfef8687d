"""Demands: what the smallest feasible budget is made of."""

from __future__ import annotations

from gascompile.core.errors import Demand
from gascompile.core.workload import TensorKind
from gascompile.passes.model.liveness import lifetimes
from gascompile.passes.model.problem import Problem


def demands(problem: Problem, arena_bytes: int) -> tuple[Demand, ...]:
    """Return what the tier that computes holds in a plan with the smallest arena; pure.

    That is the weights of the op that has most of them, what is live at the op that has most of that,
    and the states. The sizes add up to the smallest feasible budget.

    Args:
        arena_bytes: the smallest arena of any plan.
    """
    held = [*_weights(problem, arena_bytes), *_live(problem)]
    held += [
        Demand(kind=tensor.kind.value, name=tensor.name, size_bytes=tensor.size_bytes)
        for tensor in problem.workload.tensors
        if tensor.kind == TensorKind.STATE
    ]
    if problem.reserved_bytes:
        reserved = problem.reserved_bytes
        held.append(Demand(kind="reserved", name="for the runtime", size_bytes=reserved))
    return tuple(sorted(held, key=lambda demand: -demand.size_bytes))


def _weights(problem: Problem, arena_bytes: int) -> list[Demand]:
    """Return the weights of the op that needs most of them, with the room that each takes in the arena."""
    sums: dict[int, int] = {}
    for weight in problem.weights:
        for op in weight.uses:
            sums[op] = sums.get(op, 0) + weight.reserved_bytes
    if not sums:
        return []
    widest = max(sums, key=lambda op: sums[op])
    name = problem.workload.ops[widest].name
    held = [
        Demand(kind="weight", name=weight.name, size_bytes=weight.reserved_bytes, op=name)
        for weight in problem.weights
        if widest in weight.uses
    ]
    if arena_bytes > sums[widest]:
        left = arena_bytes - sums[widest]
        held.append(
            Demand(kind="weight", name="those that no slow tier has room for", size_bytes=left)
        )
    return held


def _live(problem: Problem) -> list[Demand]:
    """Return the tensors that are live at the op that sets the peak, and its workspace."""
    ops = problem.workload.ops
    if not ops:
        return []
    peak, live = problem.live.peak_op, lifetimes(problem.workload)
    held = [
        Demand(
            kind=tensor.kind.value,
            name=tensor.name,
            size_bytes=tensor.size_bytes,
            op=ops[peak].name,
        )
        for tensor in problem.workload.tensors
        if peak in live.get(tensor.name, ())
    ]
    if ops[peak].workspace_bytes:
        size_bytes = ops[peak].workspace_bytes
        name = ops[peak].name
        held.append(Demand(kind="workspace", name=name, size_bytes=size_bytes, op=name))
    return held
