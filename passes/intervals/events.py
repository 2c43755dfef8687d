"""Interval events: the moves of a schedule as the events that the replay times, and as plan steps."""

from __future__ import annotations

from collections.abc import Iterable

from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.cost_models.simulate.events import COMPUTE, PREFETCH, WAIT, Event, EventProgram
from gascompile.passes.intervals.decisions import ISSUED, Kind, Schedule

_DROP = int(Kind.DROP)
_OUTWARD = (int(Kind.STORE), int(Kind.RELEASE), int(Kind.SETTLE))


def event_program(found: Schedule) -> tuple[EventProgram, list[int]]:
    """Return the events of one iteration, and the interval of each wait in its order."""
    plan, task = found.layout, found.layout.task
    machine = task.machine
    events: list[Event] = []
    waits: list[int] = []
    copies: dict[tuple[int, bool], int] = {}
    first_wait: dict[int, int] = {}
    clock: list[float] = plan.clock.tolist()
    reached_s, begun = 0.0, 0
    for boundary, moves in enumerate(found.boundaries):
        for kind, number in moves:
            if kind == _DROP:
                continue
            if clock[boundary] > reached_s:
                events.append((COMPUTE, begun, clock[boundary] - reached_s))
                begun, reached_s = begun + 1, clock[boundary]
            outward = kind in _OUTWARD
            copy = copies.setdefault((number, outward), len(copies))
            if kind in ISSUED:
                size = task.sizes[plan.intervals[number].tensor]
                chosen = found.choices.route[number]
                assert chosen is not None, "what moves has a route"
                route = task.routes[chosen]
                link = machine.links[route.link_out or 0 if outward else route.link_in]
                events.append((PREFETCH, copy, link.transfer_time_s(size)))
            else:
                first_wait.setdefault(copy, len(events))
                events.append((WAIT, copy, 0.0))
                waits.append(number)
    if clock[-1] > reached_s:
        events.append((COMPUTE, begun, clock[-1] - reached_s))
    link_of, pipes_of = _links(found, copies)
    issued = {index: at for at, (kind, index, _) in enumerate(events) if kind == PREFETCH}
    crossing = [copy for copy, at in first_wait.items() if issued[copy] > at]
    program = EventProgram(
        events=events,
        link_of=link_of,
        pipes_of=pipes_of,
        up_front=sorted(crossing, key=lambda copy: first_wait[copy]),
        repeats=task.workload.repeats,
        num_links=len(machine.links),
        num_pipes=len(machine.pipes),
    )
    return program, waits


def _links(
    found: Schedule, copies: Iterable[tuple[int, bool]]
) -> tuple[list[int], list[tuple[tuple[int, float], ...]]]:
    """Return the link of each copy, and its pipes with the seconds that it keeps them."""
    plan, task = found.layout, found.layout.task
    machine = task.machine
    pipes = {pipe.name: (i, pipe.bandwidth_bytes_per_s) for i, pipe in enumerate(machine.pipes)}
    link_of: list[int] = []
    pipes_of: list[tuple[tuple[int, float], ...]] = []
    for number, outward in copies:
        chosen = found.choices.route[number]
        assert chosen is not None, "what moves has a route"
        route = task.routes[chosen]
        link_number = route.link_out or 0 if outward else route.link_in
        size = task.sizes[plan.intervals[number].tensor]
        link_of.append(link_number)
        shared = machine.links[link_number].shared
        pipes_of.append(tuple((pipes[name][0], size / pipes[name][1]) for name in shared))
    return link_of, pipes_of


def interval_steps(found: Schedule) -> tuple[Step, ...]:
    """Return the plan steps of a schedule; every tensor lives on the heap."""
    plan, task = found.layout, found.layout.task
    steps: list[Step] = []
    for boundary, moves in enumerate(found.boundaries):
        op = plan.runs[boundary].op if boundary < plan.num_runs else len(task.reads)
        steps += [
            Release(op=op, tensor=task.names[tensor]) for tensor in plan.dropped.get(boundary, ())
        ]
        for kind, number in moves:
            steps.extend(_steps_of(found, kind, number, op))
        if op < len(task.reads):
            source = plan.runs[boundary].source
            again = source != op
            steps.append(Recompute(op=op, source=source) if again else Compute(op=op))
    return tuple(steps)


def _steps_of(found: Schedule, kind: int, number: int, op: int) -> tuple[Step, ...]:
    task = found.layout.task
    tensor = found.layout.intervals[number].tensor
    name, size = task.names[tensor], task.sizes[tensor]
    chosen = found.choices.route[number]
    assert chosen is not None, "what moves has a route"
    route = task.routes[chosen]
    match kind:
        case Kind.RELEASE:
            return Wait(op=op, tensor=name), Release(op=op, tensor=name)
        case Kind.DROP:
            return (Release(op=op, tensor=name),)
        case Kind.STORE:
            link = task.link_out(chosen).name
            return (Offload(op=op, tensor=name, link=link, size_bytes=size),)
        case Kind.LOAD:
            link = task.machine.links[route.link_in].name
            return (Reload(op=op, tensor=name, link=link, size_bytes=size),)
        case _:
            return (Wait(op=op, tensor=name),)
