"""As mapped: the plan that executes a given placement the way accelerate's hooks do, or llama.cpp.

Weights on the tier that computes stay. Accelerate loads all others whole, right before each op that reads
them, and gives them up right after it: nothing is loaded ahead, so ops wait for every byte. Llama.cpp runs the ops
of weights in the host's memory on the host's processor, and copies what these ops read and make.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gascompile.core.budget import Budget
from gascompile.core.errors import DeviceMapError, InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size
from gascompile.core.workload import Workload
from gascompile.cost_models.simulate.replay import replay
from gascompile.passes.bounds.certify import Proof, certify
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.model.problem import Placement, Problem, problem, staged_copies
from gascompile.passes.plan.assemble import assemble
from gascompile.passes.plan.draft import Draft, draft_schedule, draft_sites
from gascompile.passes.plan.emit import emit
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.site_routes import closed
from gascompile.passes.search.sites import sited
from gascompile.passes.verify.walk import verify

STRATEGY = "device_map"
IN_PLACE = "llama_cpp"


def device_map_baseline(
    workload: Workload,
    machine: Machine,
    budget: Budget,
    tiers: Mapping[str, str],
    *,
    fingerprint: Mapping[str, str],
    site: str = "",
) -> Plan:
    """Return the verified plan with each weight on the tier that ``tiers`` says.

    Args:
        workload: what to plan.
        machine: what to plan for.
        budget: of the tier that computes, and others.
        tiers: of each weight.
        fingerprint: goes into the plan.
        site: a tier whose weights rest there with their ops, where each of these can run there.

    Raises:
        DeviceMapError: a tier does not exist, has no link to the one that computes, or is too small.
        InfeasiblePlanError: the budget does not hold what stays, and one op's other weights.
        KeyError: ``tiers`` lacks a weight.
    """
    begun_s = time.perf_counter()
    task = problem(workload, machine, budget)
    placement = Placement(strategy=IN_PLACE if site else STRATEGY, link_of=_links_of(task, tiers))
    draft = _in_place(task, placement, site) if site else None
    if draft is None:
        draft = _loaded(task, placement)
    # Nothing is searched here, so the bound is the physical limit of all plans, in whatever form.
    limit_s, binding = least_time(workload, machine, task.limits_bytes)
    proof = Proof(limit_s=limit_s, binding=binding, bound_s=0.0, timed_out=False)
    taken_s = time.perf_counter() - begun_s
    certificate = certify(draft.seconds, proof, solve_s=taken_s, mip_gap=0.0)
    plan = assemble(draft, machine, task.limits_bytes, certificate, fingerprint=fingerprint)
    verify(plan)
    return plan


def _loaded(task: Problem, placement: Placement) -> Draft:
    """Return the draft in which all weights come to the tier that computes."""
    schedule = _schedule(task, placement)
    seconds = replay(
        emit(task, schedule),
        task.workload.ops,
        task.op_times_s,
        task.machine,
        repeats=task.workload.repeats,
    ).seconds
    return draft_schedule(task, schedule.with_seconds(seconds))


def _in_place(task: Problem, placement: Placement, site: str) -> Draft | None:
    """Return the draft in which ops run where their weights rest; ``None`` where none can.

    Raises:
        DeviceMapError: ``site`` has no room for what such ops read and make beside their weights.
    """
    there = {
        i
        for i, link in enumerate(placement.link_of)
        if link is not None and task.links[link].source_tier == site
    }
    sent = closed(task, frozenset(there), site)
    if not sent:
        return None
    of = {w.name: link for w, link in zip(task.weights, placement.link_of, strict=True)}

    def others(reduced: Problem) -> Schedule:
        left = tuple(of[weight.name] for weight in reduced.weights)
        return _schedule(reduced, Placement(strategy=IN_PLACE, link_of=left))

    schedule = sited(task, site, sent, others)
    if schedule is None:
        raise DeviceMapError(
            f"'{site}' has no room for what its ops read and make beside their weights; give it more, or the tier that "
            "computes more of the weights"
        )
    return draft_sites(schedule)


def _links_of(task: Problem, tiers: Mapping[str, str]) -> tuple[int | None, ...]:
    """Return the link that each weight comes over, the fastest from its tier."""
    site = task.machine.compute_tier
    over: dict[str, int] = {}
    for i, link in reversed(list(enumerate(task.links))):
        over[link.source_tier] = i
    link_of: list[int | None] = []
    held: dict[str, list[tuple[int, str]]] = {}
    for weight in task.weights:
        tier = tiers[weight.name]
        if tier != site and tier not in over:
            raise DeviceMapError(
                f"'{weight.name}' is mapped to '{tier}', from which no link of machine '{task.machine.name}' leads to "
                f"'{site}'; its links start at {', '.join(sorted(over)) or 'no tier'}",
                names=(weight.name,),
            )
        link_of.append(None if tier == site else over[tier])
        held.setdefault(tier, []).append((weight.size_bytes, weight.name))
    for tier, room_bytes in task.room_bytes.items():
        total = sum(size_bytes for size_bytes, _ in held.get(tier, ()))
        if total > room_bytes:
            largest = [name for _, name in sorted(held[tier], reverse=True)[:4]]
            raise DeviceMapError(
                f"the map puts {format_size(total)} ({total} bytes) on '{tier}', which may hold "
                f"{format_size(room_bytes)}; the largest of it are {', '.join(largest)}",
                names=tuple(largest),
            )
    return tuple(link_of)


def _schedule(task: Problem, placement: Placement) -> Schedule:
    """Return the schedule that loads each op's weights side by side, right before it."""
    resident_bytes = sum(
        weight.reserved_bytes
        for weight, link in zip(task.weights, placement.link_of, strict=True)
        if link is None
    )
    copies = staged_copies(task, placement)
    taken: dict[int, int] = {}
    offsets = []
    for copy in copies:
        offsets.append(taken.get(copy.start, 0))
        taken[copy.start] = offsets[-1] + copy.reserved_bytes
    staging_bytes = max(taken.values(), default=0)
    if resident_bytes + staging_bytes > task.arena_limit_bytes:
        tier = task.machine.compute_tier
        widest = max(taken, key=lambda op: taken[op], default=0)
        raise InfeasiblePlanError(
            required_bytes=task.base_bytes + resident_bytes + staging_bytes,
            limit_bytes=task.limits_bytes[tier],
            tier=tier,
            op=task.workload.ops[widest].name if task.workload.ops else task.workload.name,
        )
    return Schedule(
        placement=placement,
        resident_bytes=resident_bytes,
        staging_bytes=staging_bytes,
        copies=tuple(copies),
        offsets=tuple(offsets),
        points=tuple(copy.start for copy in copies),
        seconds=0.0,
    )
