"""Plans whose weights come in two hops, by chance and without a search, for what runs and checks them."""

from __future__ import annotations

import random
from dataclasses import replace

from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.passes.bounds.certify import Proof, certify
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.model.problem import Placement, Problem, problem
from gascompile.passes.plan.assemble import assemble
from gascompile.passes.plan.draft import draft_schedule
from gascompile.passes.search.hop_schedule import (
    HopCopies,
    homes_of,
    hop_copies,
    hop_schedule,
    hops,
)
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.search import resident_bytes, staging_sizes_of

REACHES = (0, 1, 3, 1 << 30)


def on_gpu(workload: Workload, time_s: float | None = None) -> Workload:
    """Return the workload with its ops on the GPU alone, each as long as ``time_s`` where that is given."""
    ops = (
        replace(op, time_s={"gpu": op.time_s["cpu"] if time_s is None else time_s})
        for op in workload.ops
    )
    return replace(workload, ops=tuple(ops))


def task_of(workload: Workload, machine: Machine) -> Problem:
    """Return the problem with as much room as there is anywhere."""
    return problem(workload, machine, Budget({p.name: p.size_bytes for p in machine.places}))


def hop_plan(workload: Workload, machine: Machine, seed: int, *, num_residents: int = 1) -> Plan:
    """Return a valid plan of which some weights come in two hops, the same for the same seed.

    Args:
        workload: with ops on the GPU.
        machine: with a link from the drive to the host.
        seed: of the choices.
        num_residents: weights that stay, at most.
    """
    chance = random.Random(seed)
    task = task_of(workload, machine)
    (hop,) = hops(task)
    weights = [w for w in range(len(task.weights)) if task.weights[w].uses]
    residents = frozenset(chance.sample(weights, max(0, min(num_residents, len(weights) - 1))))
    held = chance.choice((0, 0, sum(task.weights[w].size_bytes for w in weights) // 3))
    placement = homes_of(task, residents, hop, held, strategy="chance")
    assert placement is not None, "the drive holds everything"
    kept = frozenset(
        (w, j)
        for w in weights
        for j in range(len(task.weights[w].uses) - 1)
        if chance.random() < 0.3
    )
    placement = replace(placement, kept=kept)
    made = hop_copies(task, placement, hop, chance.choice(REACHES))
    return planned(task, _packed(task, placement, made, chance))


def _packed(
    task: Problem, placement: Placement, made: HopCopies, chance: random.Random
) -> Schedule:
    (hop,) = hops(task)
    taken = resident_bytes(task, [w for w, link in enumerate(placement.link_of) if link is None])
    middle = staging_sizes_of(task, made.fetched)
    sizes = [(a, b) for a in staging_sizes_of(task, made.copies) for b in middle]
    chance.shuffle(sizes)
    for staging_bytes, middle_bytes in sizes:
        schedule = hop_schedule(
            task,
            placement,
            hop,
            made,
            resident_bytes=taken,
            staging_bytes=staging_bytes,
            middle_bytes=middle_bytes,
        )
        if schedule is not None:
            return schedule
    raise AssertionError("the largest sizes pack")


def planned(task: Problem, schedule: Schedule) -> Plan:
    """Return the plan of a schedule, of which nothing is proven but its physical limit."""
    draft = draft_schedule(task, schedule)
    limit_s, binding = least_time(task.workload, task.machine, task.limits_bytes)
    assert limit_s <= draft.seconds * (1 + 1e-9), "no plan beats it"
    proof = Proof(limit_s=limit_s, binding=binding, bound_s=0.0, timed_out=False)
    certificate = certify(draft.seconds, proof, solve_s=0.0, mip_gap=0.0)
    return assemble(draft, task.machine, task.limits_bytes, certificate, fingerprint={})
