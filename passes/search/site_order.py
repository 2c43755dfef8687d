"""Site order: the ops of a workload in the order in which sites that work at once are done with them.

A site comes to its half of a copy in the order of the program. So an op of the one site that stands behind ops of the
other which end later holds its copies up; in the order of their ends none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gascompile.core.machine import Machine
from gascompile.core.workload import TensorKind, Workload
from gascompile.cost_models.formulas.contention import giving_s
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
    ends_s, _ = site_ends(workload, sites, machine)
    return tuple(sorted(range(len(ends_s)), key=lambda i: (ends_s[i], i)))


def site_ends(
    workload: Workload, sites: Sequence[str], machine: Machine
) -> tuple[list[float], float]:
    """Return when each op ends, with all weights at hand, and when outputs are back where others compute.

    The arguments are those of ``site_order``.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    free_s = dict.fromkeys(sites, 0.0)
    made: dict[str, tuple[str, float]] = {}
    viewed_s: dict[str, float] = {}
    """Per tensor the end of the last view of it: what reads it behind that may read the view."""
    ends_s: list[float] = []

    def there_s(name: str, site: str) -> float:
        source, made_s = made[name]
        if source == site:
            return made_s
        link = machine.link(f"{source}->{site}")
        return made_s + giving_s(machine, sizes[name]) + link.transfer_time_s(sizes[name])

    for op, site in zip(workload.ops, sites, strict=True):
        names = [name for name in (*op.reads, *op.writes) if name in made]
        needed_s = (max(there_s(name, site), viewed_s.get(name, 0.0)) for name in names)
        free_s[site] = max(free_s[site], *needed_s) if names else free_s[site]
        free_s[site] += op.time_s[site]
        ends_s.append(free_s[site])
        made.update(dict.fromkeys(op.writes, (site, free_s[site])))
        if not op.writes:
            viewed_s.update(dict.fromkeys(op.reads, free_s[site]))
    outputs = (t.name for t in workload.tensors if t.kind == TensorKind.OUTPUT and t.name in made)
    back_s = (there_s(name, machine.compute_tier) for name in outputs)
    return ends_s, max((*free_s.values(), *back_s), default=0.0)


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
