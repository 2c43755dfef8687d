"""Assemble: a schedule and its certificate as a plan."""

from __future__ import annotations

from collections.abc import Mapping

from gascompile.cost_models.gathers import gather_link_bytes
from gascompile.ir import Certificate, OpPlan, Plan, Prefetch, Step, TensorKind, TensorPlan
from gascompile.passes.emit import emit
from gascompile.passes.problem import Problem
from gascompile.passes.schedule import Schedule


def assemble(
    problem: Problem,
    schedule: Schedule,
    certificate: Certificate,
    *,
    fingerprint: Mapping[str, str],
    warnings: tuple[str, ...] = (),
    pinned: Mapping[str, TensorPlan] | None = None,
) -> Plan:
    """Return the plan.

    Args:
        pinned: residents with the addresses that they must keep; by default they are packed from 0 on.
    """
    site = problem.machine.compute_tier
    tensors = _tensors(problem, schedule, pinned)
    steps = emit(problem, schedule)
    peak_bytes = dict.fromkeys(problem.machine.tiers, 0)
    for tensor in tensors.values():
        if tensor.home != site and tensor.kind == TensorKind.WEIGHT:
            peak_bytes[tensor.home] += tensor.size_bytes
    peak_bytes[site] = schedule.arena_bytes + problem.live.state_bytes + problem.live.peak_bytes
    return Plan(
        fingerprint=dict(fingerprint),
        strategy=schedule.placement.strategy,
        budget_bytes=dict(problem.limits_bytes),
        arena_bytes={site: schedule.arena_bytes},
        peak_bytes=peak_bytes,
        link_bytes=_link_bytes(problem, steps),
        tensors=tensors,
        ops=tuple(
            OpPlan(name=op.name, site=site, time_s=op.time_s[site]) for op in problem.workload.ops
        ),
        steps=steps,
        certificate=certificate,
        workload=problem.workload,
        machine=problem.machine,
        warnings=warnings,
    )


def _tensors(
    problem: Problem, schedule: Schedule, pinned: Mapping[str, TensorPlan] | None
) -> dict[str, TensorPlan]:
    site = problem.machine.compute_tier
    homes = dict(problem.idle_homes)
    addresses: dict[str, int] = {}
    free = 0
    for weight, link in zip(problem.weights, schedule.placement.link_of, strict=True):
        if link is not None:
            homes[weight.name] = problem.links[link].source_tier
        elif pinned is None:
            addresses[weight.name] = free
            free += weight.reserved_bytes
    for name, tensor in (pinned or {}).items():
        if tensor.address is not None:
            homes[name] = site
            addresses[name] = tensor.address
    planned = {
        tensor.name: TensorPlan(
            home=homes.get(tensor.name, site),
            kind=tensor.kind,
            size_bytes=tensor.size_bytes,
            address=addresses.get(tensor.name),
        )
        for tensor in problem.workload.tensors
    }
    for name, tensor in (pinned or {}).items():
        planned.setdefault(name, tensor)
    return planned


def _link_bytes(problem: Problem, steps: tuple[Step, ...]) -> dict[str, int]:
    moved = {link.name: 0 for link in problem.machine.links}
    for step in steps:
        if isinstance(step, Prefetch):
            moved[step.link] += step.size_bytes
    for link, size_bytes in gather_link_bytes(problem.workload.ops, problem.machine).items():
        moved[link] += size_bytes
    return moved
