"""Contention: processors that compute at once may want the same memory, cores or caches, and slow each other down."""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import OpSpec
from gascompile.cost_models.formulas.interference import share_at


def contended(
    ops: Sequence[OpSpec], op_times_s: Sequence[float], sites: Sequence[str], machine: Machine
) -> list[float]:
    """Return the seconds of ops that run at ``sites``, where the others have ops meanwhile.

    An op that takes ``t`` alone takes ``t / (1 - lost share)`` as long as another site is at ops. That is the whole
    time of the site with less to do, and as much of the others' time as that can be.

    Args:
        ops: of an iteration.
        op_times_s: seconds of each, contention-free.
        sites: where each runs.
        machine: without a ``contention`` nothing is lost.
    """
    if machine.contention is None or len(set(sites)) < 2:
        return list(op_times_s)
    busy_s = dict.fromkeys(sites, 0.0)
    for site, time_s in zip(sites, op_times_s, strict=True):
        busy_s[site] += time_s
    all_s = sum(busy_s.values())
    beside = {
        site: min(1.0, (all_s - own_s) / own_s) if own_s else 0.0 for site, own_s in busy_s.items()
    }
    return [
        time_s * (1 + beside[site] * (slowed_by(op, machine) - 1))
        for op, time_s, site in zip(ops, op_times_s, sites, strict=True)
    ]


def slowed_by(op: OpSpec, machine: Machine) -> float:
    """Return how many times as long an op takes while another site is at ops."""
    points = machine.contention.points if machine.contention is not None else ()
    return 1 / (1 - share_at(points, op.arithmetic_intensity))


def giving_s(machine: Machine, size_bytes: int) -> float:
    """Return the seconds that a copy to another site takes of the one that hands it over."""
    if machine.contention is None:
        return 0.0
    return machine.contention.give_s + size_bytes * machine.contention.give_s_per_byte


def plan_times(plan: Plan, machine: Machine) -> list[float]:
    """Return the seconds of a plan's ops where they run, beside those that run elsewhere."""
    sites = [op.site for op in plan.ops]
    return contended(plan.workload.ops, [op.time_s for op in plan.ops], sites, machine)
