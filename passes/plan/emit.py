"""Emit: a schedule as the steps of a plan, in program order."""

from __future__ import annotations

from gascompile.core.steps import Compute, Evict, Fetch, Prefetch, Release, Step, Wait
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.schedule import Schedule, program_points, start_points


def emit(problem: Problem, schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps of one iteration: before each op what it frees, what may start, what it needs."""
    num_ops = len(problem.op_times_s)
    copies = schedule.copies
    names = [problem.weights[copy.weight].name for copy in copies]
    address = [schedule.resident_bytes + offset for offset in schedule.offsets]
    releases: dict[int, list[int]] = {}
    for i, copy in enumerate(copies):
        releases.setdefault(copy.end + 1, []).append(i)
    moves = program_points(copies, schedule.points, num_ops)
    half_the_way = _middle_steps(problem, schedule)
    steps: list[Step] = []
    for op in range(num_ops + 1):
        prefetches, waits = moves.get(op, ([], []))
        steps.extend(
            Release(op=op, tensor=names[i], address=address[i]) for i in releases.get(op, ())
        )
        steps.extend(half_the_way.get(op, ()))
        for i in prefetches:
            weight, link = problem.weights[copies[i].weight], problem.links[copies[i].link]
            steps.append(
                Prefetch(
                    op=op,
                    tensor=weight.name,
                    link=link.name,
                    size_bytes=weight.size_bytes,
                    address=address[i],
                )
            )
        steps.extend(Wait(op=op, tensor=names[i], address=address[i]) for i in waits)
        if op < num_ops:
            steps.append(Compute(op=op))
    return tuple(steps)


def _middle_steps(problem: Problem, schedule: Schedule) -> dict[int, list[Step]]:
    """Return per op what is given up and what is fetched in the place in between before it."""
    middle, num_ops = schedule.middle, len(problem.op_times_s)
    steps: dict[int, list[Step]] = {}
    if middle is None:
        return steps
    for copy, address in zip(middle.copies, middle.offsets, strict=True):
        op = copy.end + 1
        name = problem.weights[copy.weight].name
        gone = Evict(op=op, tensor=name, place=middle.place, address=address)
        steps.setdefault(op, []).append(gone)
    link = problem.machine.links[middle.feed].name
    for op, started in start_points(middle.copies, middle.points, num_ops).items():
        for i in started:
            weight = problem.weights[middle.copies[i].weight]
            steps.setdefault(op, []).append(
                Fetch(
                    op=op,
                    tensor=weight.name,
                    link=link,
                    size_bytes=weight.size_bytes,
                    place=middle.place,
                    address=middle.offsets[i],
                )
            )
    return steps
