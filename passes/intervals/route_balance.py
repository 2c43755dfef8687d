"""Interval balance: a new route for each interval that leaves, so that all links are busy all the time.

Intervals are gone through from the longest to the shortest. Each takes the slowest route whose queues,
out and in, are short enough when the tensor could leave and when it has to be back: the queue out is counted
from the start of the list, the queue in from its end. Short queues hold little memory; what then finds no
slow route takes the fast one, which short transfers suit best.
"""

from __future__ import annotations

import math

from gascompile.passes.intervals.selection import Selection


def route_balance(selection: Selection, *, out_s: float, in_s: float) -> Selection:
    """Return the same intervals on routes that share the load.

    Args:
        selection: the intervals that leave; those that no run accesses, or around the end, keep their routes.
        out_s: how long a copy out may wait for its link.
        in_s: how long before its use a copy back may have to end for those that follow it on its link.
    """
    plan, task = selection.plan, selection.plan.task
    balanced = Selection(plan)
    inner: list[int] = []
    for j, route in selection.routes.items():
        if plan.intervals[j].unused or plan.intervals[j].wraps:
            balanced.add(j, route)
        else:
            inner.append(j)
    last = len(task.routes) - 1
    out_free = [0.0] * len(task.routes)
    in_free = [math.inf] * len(task.routes)
    begin = {j: float(plan.clock[plan.intervals[j].start + 1]) for j in inner}
    due = {j: float(plan.clock[plan.intervals[j].end]) for j in inner}
    for j in sorted(inner, key=lambda j: begin[j] - due[j]):
        wanted = next(
            (
                route
                for route in range(last, 0, -1)
                if due[j] - in_free[route] <= in_s and out_free[route] - begin[j] <= out_s
            ),
            0,
        )
        if balanced.add(j, wanted):
            route, tensor = balanced.routes[j], plan.intervals[j].tensor
            in_free[route] = min(in_free[route], due[j]) - task.load_s(tensor, route)
            if task.written[tensor]:
                out_free[route] = max(out_free[route], begin[j]) + task.store_s(tensor, route)
    return balanced
