"""Draft: a plan that lacks only its accounts and its certificate, made from what each planner returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gascompile.core.plan import TensorPlan
from gascompile.core.steps import Step
from gascompile.core.workload import Workload
from gascompile.cost_models.simulate.replay import replay
from gascompile.passes.model.intervals import IntervalPlan
from gascompile.passes.model.problem import Problem
from gascompile.passes.plan.emit import emit
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.site_routes import SiteMoves
from gascompile.passes.search.sites import SitedSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Where everything is and when it moves."""

    workload: Workload
    strategy: str
    arena_bytes: int
    tensors: Mapping[str, TensorPlan]
    op_sites: tuple[str, ...]
    steps: tuple[Step, ...]
    seconds: float
    """What the replay of the steps takes."""
    middle_bytes: Mapping[str, int] = field(default_factory=dict)
    """Arenas of places in between."""


def draft_schedule(
    task: Problem, schedule: Schedule, residents: Mapping[str, TensorPlan] | None = None
) -> Draft:
    """Return the draft of a schedule of weights.

    Args:
        task: the problem that was scheduled.
        schedule: its schedule.
        residents: weights with the addresses that they must keep; by default they are packed from 0 on.
    """
    return Draft(
        workload=task.workload,
        strategy=schedule.placement.strategy,
        arena_bytes=schedule.arena_bytes,
        tensors=_tensors(task, schedule, residents),
        op_sites=(task.machine.compute_tier,) * len(task.workload.ops),
        steps=emit(task, schedule),
        seconds=schedule.seconds,
        middle_bytes={middle.place: middle.size_bytes} if (middle := schedule.middle) else {},
    )


def draft_moved(
    task: Problem, schedule: Schedule, moves: Mapping[int, Sequence[Step]], *, buffer_bytes: int
) -> Draft:
    """Return the draft of a schedule of weights with moves of activations.

    Args:
        task: the problem that was scheduled.
        schedule: its schedule.
        moves: per op the steps on the heap before it.
        buffer_bytes: what the moves take at the end of the arena.
    """
    draft = draft_schedule(task, schedule)
    among = SiteMoves(before={op: list(steps) for op, steps in moves.items()})
    steps = among.merged(draft.steps, len(draft.op_sites))
    seconds = replay(
        steps, task.workload.ops, task.op_times_s, task.machine, repeats=task.repeats
    ).seconds
    arena_bytes = schedule.arena_bytes + buffer_bytes
    return replace(draft, steps=steps, seconds=seconds, arena_bytes=arena_bytes)


def draft_sites(sited: SitedSchedule) -> Draft:
    """Return the draft of a schedule in which some ops run elsewhere."""
    return Draft(
        workload=sited.task.workload,
        strategy=sited.schedule.placement.strategy,
        arena_bytes=sited.schedule.arena_bytes,
        tensors=_tensors(sited.task, sited.schedule, None),
        op_sites=sited.op_sites,
        steps=sited.steps,
        seconds=sited.seconds,
    )


def draft_intervals(workload: Workload, interval_plan: IntervalPlan) -> Draft:
    """Return the draft of a plan that keeps everything on the heap."""
    return Draft(
        workload=workload,
        strategy=interval_plan.strategy,
        arena_bytes=0,
        tensors={
            tensor.name: TensorPlan(
                home=interval_plan.homes[tensor.name],
                kind=tensor.kind,
                size_bytes=tensor.size_bytes,
                forms=tensor.forms,
            )
            for tensor in workload.tensors
        },
        op_sites=interval_plan.sites,
        steps=interval_plan.steps,
        seconds=interval_plan.seconds,
    )


def _tensors(
    task: Problem, schedule: Schedule, residents: Mapping[str, TensorPlan] | None
) -> dict[str, TensorPlan]:
    site = task.machine.compute_tier
    homes = dict(task.unread_homes)
    addresses: dict[str, int] = {}
    free = 0
    for weight, link in zip(task.weights, schedule.placement.link_of, strict=True):
        if link is not None:
            homes[weight.name] = task.links[link].source_tier
        elif residents is None:
            addresses[weight.name] = free
            free += weight.reserved_bytes
    for name, tensor in (residents or {}).items():
        if tensor.address is not None:
            homes[name] = site
            addresses[name] = tensor.address
    planned = {
        tensor.name: TensorPlan(
            home=homes.get(tensor.name, site),
            kind=tensor.kind,
            size_bytes=tensor.size_bytes,
            address=addresses.get(tensor.name),
            forms=tensor.forms,
        )
        for tensor in task.workload.tensors
    }
    for name, tensor in (residents or {}).items():
        planned.setdefault(name, tensor)
    return planned
