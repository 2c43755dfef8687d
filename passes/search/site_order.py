"""Site order: the ops of a workload in the order in which sites that work at once are done with them.

A site comes to its half of a copy in the order of the program. So an op of the one site that stands behind ops of the
other which end later holds its copies up; in the order of their ends none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gascompile.core.machine import Machine
from gascompile.core.workload import Workload
from gascompile.cost_models.simulate.events import running_sums
from gascompile.passes.model.liveness import liveness
from gascompile.passes.model.problem import Problem


def site_order(workload: Workload, sites: Sequence[str], machine: Machine) -> tuple[int, ...]:
    """Return the numbers of the ops in the order of their ends; ops of one site stay in theirs.

    Args:
        workload: its ops are in an order in which they can run.
        sites: where each op runs; what needs something from elsewhere waits for its copy.
        machine: with links between these sites.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    free_s = dict.fromkeys(sites, 0.0)
    made: dict[str, tuple[str, float]] = {}
    viewed_s: dict[str, float] = {}
    """Per tensor the end of the last view of it: what reads it behind that may read the view."""
    ends_s: list[float] = []
    for op, site in zip(workload.ops, sites, strict=True):
        ready_s = free_s[site]
        for name in (*op.reads, *op.writes):
            if name in made:
                source, made_s = made[name]
                if source != site:
                    link = machine.link(f"{source}->{site}")
                    made_s += link.transfer_time_s(sizes[name])
                ready_s = max(ready_s, made_s, viewed_s.get(name, 0.0))
        free_s[site] = ready_s + op.time_s[site]
        ends_s.append(free_s[site])
        made.update(dict.fromkeys(op.writes, (site, free_s[site])))
        if not op.writes:
            viewed_s.update(dict.fromkeys(op.reads, free_s[site]))
    return tuple(sorted(range(len(ends_s)), key=lambda i: (ends_s[i], i)))


def reordered(task: Problem, order: Sequence[int]) -> Problem:
    """Return the problem of the same ops in another order, in which they can run, all at the tier that computes."""
    workload = replace(task.workload, ops=tuple(task.workload.ops[i] for i in order))
    place = {op: i for i, op in enumerate(order)}
    weights = (
        replace(weight, uses=tuple(sorted(place[op] for op in weight.uses)))
        for weight in task.weights
    )
    times_s = tuple(op.time_s[task.machine.compute_tier] for op in workload.ops)
    return replace(
        task,
        workload=workload,
        live=liveness(workload),
        weights=tuple(sorted(weights, key=lambda weight: weight.uses[:1])),
        op_times_s=times_s,
        sums_s=tuple(running_sums(times_s)),
    )
