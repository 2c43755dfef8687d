"""Pin: plan a second workload inside the arena of a first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.plan import Plan, TensorPlan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import TensorKind
from gascompile.passes.model.problem import Placement, Problem
from gascompile.passes.search.schedule import Schedule, schedule
from gascompile.passes.search.search import least_arena_bytes, snap, staging_sizes, time_bound_s
from gascompile.passes.search.strategies import REACHES, near_intervals, placements_of


def share_arena(problem: Problem, arena_of: Plan) -> Schedule:
    """Return a schedule in the arena of ``arena_of``: its residents stay, all other weights are streamed.

    Raises:
        InfeasiblePlanError: the arena does not fit the budget beside this workload's activations, or
            the part of it that is not resident is too small for one of the ops.
    """
    arena_bytes = arena_of.arena_bytes[problem.machine.compute_tier]
    residents = residents_of(arena_of)
    bottom = max((_end(tensor) for tensor in residents.values()), default=0)
    streamed = [i for i, weight in enumerate(problem.weights) if weight.name not in residents]
    resident = frozenset(range(len(problem.weights))) - set(streamed)
    placements = _at_its_homes(problem, streamed, arena_of) or placements_of(
        problem, resident, "pinned"
    )
    if not placements:
        _refuse(problem, bottom + sum(problem.weights[i].reserved_bytes for i in streamed), 0)
    need_bytes, op = _least_staging(problem, placements[0])
    if bottom + need_bytes > arena_bytes or arena_bytes > problem.arena_limit_bytes:
        _refuse(problem, max(arena_bytes, bottom + need_bytes), op)
    best: Schedule | None = None
    for placement in placements:
        sizes = {s for s in staging_sizes(problem, placement) if bottom + s <= arena_bytes}
        for staging_bytes in sorted(sizes | {arena_bytes - bottom}):
            staged = schedule(problem, placement, staging_bytes, resident_bytes=bottom)
            if staged is not None and (best is None or staged.seconds < best.seconds):
                best = snap(staged, time_bound_s(problem, staged.placement))
    assert best is not None, "streaming each op's weights alone always packs"
    return best.with_staging(arena_bytes - bottom)


def _at_its_homes(problem: Problem, streamed: Sequence[int], arena_of: Plan) -> list[Placement]:
    """Return placements with the homes of ``arena_of``; none where it does not know all weights.

    Slow tiers have room for one home of each, and for what waits there half the way.
    """
    sources = [link.source_tier for link in problem.links]
    names = [weight.name for weight in problem.weights]
    if any(names[i] not in arena_of.tensors for i in streamed):
        return []
    link_of: list[int | None] = [None] * len(names)
    for i in streamed:
        link_of[i] = sources.index(arena_of.tensors[names[i]].home)
    kept = dict.fromkeys(near_intervals(problem, streamed, reach) for reach in REACHES)
    return [Placement(strategy="pinned", link_of=tuple(link_of), kept=each) for each in kept]


def residents_of(arena_of: Plan) -> dict[str, TensorPlan]:
    """Return the weights that ``arena_of`` keeps in its arena."""
    return {
        name: tensor
        for name, tensor in arena_of.tensors.items()
        if tensor.kind == TensorKind.WEIGHT and tensor.address is not None
    }


def _end(tensor: TensorPlan) -> int:
    return (tensor.address or 0) + reserve_bytes(tensor.size_bytes)


def _least_staging(problem: Problem, placement: Placement) -> tuple[int, int]:
    needed, op = least_arena_bytes(problem, placement)
    resident = sum(
        weight.reserved_bytes
        for weight, link in zip(problem.weights, placement.link_of, strict=True)
        if link is None
    )
    return needed - resident, op


def _refuse(problem: Problem, arena_bytes: int, op: int) -> NoReturn:
    tier = problem.machine.compute_tier
    ops = problem.workload.ops
    raise InfeasiblePlanError(
        required_bytes=problem.base_bytes + arena_bytes,
        limit_bytes=problem.limits_bytes[tier],
        tier=tier,
        op=ops[op].name if ops else problem.workload.name,
    )
