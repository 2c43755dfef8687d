"""Interval events: the moves of a schedule as the events that the replay times, and as plan steps."""

from __future__ import annotations

from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.cost_models.simulate.clock import Pipes
from gascompile.cost_models.simulate.events import COMPUTE, PREFETCH, WAIT, Event, EventProgram
from gascompile.passes.intervals.decisions import ISSUED, Kind, MoveList

_DROP = int(Kind.DROP)
_OUTWARD = (int(Kind.STORE), int(Kind.RELEASE), int(Kind.STORED))


def event_program(schedule: MoveList) -> tuple[EventProgram, list[int]]:
    """Return the events of one iteration, and the interval of each wait in its order."""
    plan, task = schedule.layout, schedule.layout.task
    events: list[Event] = []
    waits: list[int] = []
    copies: dict[tuple[int, bool], int] = {}
    link_of: list[int] = []
    pipes_of: list[Pipes] = []
    seconds: list[float] = []
    clock: list[float] = plan.clock.tolist()
    reached_s, begun = 0.0, 0
    for boundary, moves in enumerate(schedule.boundaries):
        for kind, number in moves:
            if kind == _DROP:
                continue
            if clock[boundary] > reached_s:
                events.append((COMPUTE, begun, clock[boundary] - reached_s))
                begun, reached_s = begun + 1, clock[boundary]
            outward = kind in _OUTWARD
            copy = copies.setdefault((number, outward), len(copies))
            if copy == len(link_of):
                route = schedule.decisions.route[number]
                assert route is not None, "what moves has a route"
                tensor = plan.intervals[number].tensor
                link, time_s, pipes = task.transfer(tensor, route, out=outward)
                link_of.append(link)
                seconds.append(time_s)
                pipes_of.append(pipes)
            if kind in ISSUED:
                events.append((PREFETCH, copy, seconds[copy]))
            else:
                events.append((WAIT, copy, 0.0))
                waits.append(number)
    if clock[-1] > reached_s:
        events.append((COMPUTE, begun, clock[-1] - reached_s))
    program = EventProgram(
        events=events,
        link_of=link_of,
        pipes_of=pipes_of,
        repeats=task.workload.repeats,
        num_links=len(task.machine.links),
        num_pipes=len(task.machine.pipes),
    )
    return program, waits


def interval_steps(schedule: MoveList) -> tuple[Step, ...]:
    """Return the plan steps of a schedule; every tensor lives on the heap."""
    plan, task = schedule.layout, schedule.layout.task
    steps: list[Step] = []
    for boundary, moves in enumerate(schedule.boundaries):
        op = plan.runs[boundary].op if boundary < plan.num_runs else len(task.reads)
        steps += [
            Release(op=op, tensor=task.names[tensor]) for tensor in plan.dropped.get(boundary, ())
        ]
        for kind, number in moves:
            steps.extend(_steps_of(schedule, kind, number, op))
        if op < len(task.reads):
            source = plan.runs[boundary].source
            again = source != op
            steps.append(Recompute(op=op, source=source) if again else Compute(op=op))
    return tuple(steps)


def _rests_on(schedule: MoveList, tensor: int) -> int | None:
    """Return the route by which a tensor is away around the end: a copy of it stays there, however old."""
    return next(
        (
            route
            for interval, route in zip(
                schedule.layout.intervals, schedule.decisions.route, strict=True
            )
            if interval.tensor == tensor and interval.wraps
        ),
        None,
    )


def _steps_of(schedule: MoveList, kind: int, number: int, op: int) -> tuple[Step, ...]:
    task = schedule.layout.task
    tensor = schedule.layout.intervals[number].tensor
    name, size = task.names[tensor], task.sizes[tensor]
    chosen = schedule.decisions.route[number]
    assert chosen is not None, "what moves has a route"
    route = task.routes[chosen]
    match kind:
        case Kind.RELEASE:
            return Wait(op=op, tensor=name), Release(op=op, tensor=name)
        case Kind.DROP:
            return (Release(op=op, tensor=name),)
        case Kind.STORE:
            link = task.link_out(chosen).name
            if _rests_on(schedule, tensor) == chosen:
                size = task.changed_bytes[tensor]
            return (Offload(op=op, tensor=name, link=link, size_bytes=size),)
        case Kind.LOAD:
            link = task.machine.links[route.link_in].name
            return (Reload(op=op, tensor=name, link=link, size_bytes=size),)
        case _:
            return (Wait(op=op, tensor=name),)
