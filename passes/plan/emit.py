"""Emit: a schedule as the steps of a plan, in program order."""

from __future__ import annotations

from gascompile.core.steps import Compute, Prefetch, Release, Step, Wait
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.schedule import Schedule, program_points


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
    steps: list[Step] = []
    for op in range(num_ops + 1):
        prefetches, waits = moves.get(op, ([], []))
        steps.extend(
            Release(op=op, tensor=names[i], address=address[i]) for i in releases.get(op, ())
        )
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
